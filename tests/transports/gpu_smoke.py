"""First look at the GPU transports: every kind in turn, in processes of its own, with a limit each.

    python3 tests/transports/gpu_smoke.py [--nccl-library FILE] [--kinds nccl,put] [--logs FOLDER]

Prints PASS or FAIL per kind, with the reason and the end of both ranks' output. Exit code 1 if any
failed. Needs two GPUs.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 45.0
TAIL_LINES = 60


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="copy_engine,put,nccl")
    parser.add_argument("--nccl-library")
    parser.add_argument("--logs")
    parser.add_argument("--worker", nargs=3, metavar=("KIND", "RANK", "PORT"))
    arguments = parser.parse_args()
    if arguments.worker:
        kind, rank, port = arguments.worker
        _work(kind, int(rank), int(port), arguments.nccl_library)
        return 0
    logs = Path(arguments.logs or tempfile.mkdtemp(prefix="gpu_smoke"))
    logs.mkdir(parents=True, exist_ok=True)
    verdicts = [_try(k, arguments.nccl_library, logs) for k in arguments.kinds.split(",")]
    print("\n" + "\n".join(verdicts), flush=True)
    return int(any("FAIL" in verdict for verdict in verdicts))


def _try(kind: str, nccl_library: str | None, logs: Path) -> str:
    """Runs both ranks of one kind; the verdict in one line."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start, processes, paths = time.monotonic(), [], []
    for rank in range(2):
        path = logs / f"smoke_{kind}_rank{rank}.log"
        command = [sys.executable, "-u", __file__, "--worker", kind, str(rank), str(store.port)]
        command += ["--nccl-library", nccl_library] if nccl_library else []
        environment = {
            **os.environ,
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        with path.open("w") as log:
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            )
        paths.append(path)
    codes: list[int | str] = []
    for process in processes:
        try:
            left = max(0.1, LIMIT_SECONDS - (time.monotonic() - start))
            codes.append(process.wait(left))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # its stacks go to the log
            time.sleep(1)
            process.kill()
            process.wait()
            codes.append("no end")
    seconds = time.monotonic() - start
    # put cannot undo a wait: the rank that was left in one has to end by itself.
    good = codes == ([0, 86] if kind == "put" else [0, 0])
    for path in paths:
        lines = path.read_text(errors="replace").splitlines()
        print(f"--- {path.name}", *lines[-(12 if good else TAIL_LINES) :], sep="\n", flush=True)
    return f"{'PASS' if good else 'FAIL'} {kind}: exit codes {codes}, {seconds:.1f} s"


def _work(kind: str, rank: int, port: int, nccl_library: str | None) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    from torch.distributed import TCPStore

    from ppruntime.transports import open_transport
    from ppruntime.transports.base import Boundary, Channel, TensorSpec, TransportError
    from ppruntime.transports.selftest import first_difference, payload

    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.2f} s, rank {rank}] {text}", flush=True)

    store = TCPStore("127.0.0.1", port, is_master=False)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}, {kind}")
    mixed = Boundary(
        (
            TensorSpec("hidden", (1024, 4, 64), torch.bfloat16),
            TensorSpec("slots", (1024, 33), torch.int32),
            TensorSpec("scale", (7,), torch.float32),
            TensorSpec("empty", (0, 5), torch.float32),
        )
    )
    large = Boundary((TensorSpec("hidden", (8192, 4, 5120), torch.bfloat16),))
    channels = [
        Channel(0, "forward", 0, 1, 0, 1, mixed, 2),
        Channel(1, "backward", 1, 0, 1, 0, mixed, 1),
        Channel(2, "forward", 0, 1, 2, 3, large, 2),
        Channel(3, "backward", 1, 0, 3, 2, large, 2),
    ]
    options = {"nccl_library": nccl_library} if kind == "put" and nccl_library else {}
    transport = open_transport(
        kind, channels, rank, device=device, timeout_seconds=20, store=store, **options
    )
    say(f"opened; {torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB free")
    found = transport.start_up
    say(f"start-up test took {found.seconds:.3f} s over {found.num_streams} streams")
    for line in found.times:
        say(f"  {line}")
    for channel in channels:
        for step in range(3):
            for micro_batch in range(8):
                if channel.src_rank == rank:
                    message = step * 8 + micro_batch
                    transport.send(channel, micro_batch, payload(channel, message, device))
                else:
                    transport.post(channel, micro_batch)
                    views = transport.take(channel, micro_batch)
                    wanted = payload(channel, step * 8 + micro_batch, device)
                    difference = first_difference(views, wanted)
                    assert difference is None, f"{channel}, {micro_batch}: {difference}"
                    for view in views:
                        view.view(torch.uint8).fill_(0xA5) if view.numel() else None
                    transport.release(channel, micro_batch)
            transport.step_end()
    say("24 messages of each channel were right")
    _both_ways(transport, channels[2:], rank, device, say)
    if rank == 1:
        transport.post(channels[0], 99)
        transport.take(channels[0], 99)
        store.set("waits", "")
        say("a wait for a message that does not come is pending")
    else:
        store.wait(["waits"])
        begin = time.monotonic()
        transport.abort("the smoke test is done")
        say(f"aborted in {time.monotonic() - begin:.2f} s")
    if kind == "put" and rank == 1:
        say("put cannot undo the wait: this process must end with code 86 by itself")
        try:
            torch.cuda.synchronize(device)
        finally:
            say("the wait was undone, which put does not promise")
    begin = time.monotonic()
    torch.cuda.synchronize(device)
    say(f"the GPU is idle {time.monotonic() - begin:.2f} s later")
    try:
        while time.monotonic() - begin < 10:
            transport.step_end()
            time.sleep(0.1)
        raise AssertionError("the abort was not noticed")
    except TransportError as error:
        say(f"as it should: {error}")
    transport.close()
    say("closed")


def _both_ways(transport, channels, rank, device, say) -> None:
    import torch

    outgoing, incoming = sorted(channels, key=lambda c: c.src_rank != rank)
    tensor = torch.randn(8192, 4, 5120, device=device).to(torch.bfloat16)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    num = 16
    for m in range(num):
        transport.send(outgoing, m, (tensor,))
        transport.post(incoming, m)
        transport.take(incoming, m)
        (first if m == 0 else last).record()
        transport.release(incoming, m)
    transport.step_end()
    torch.cuda.synchronize(device)
    seconds = first.elapsed_time(last) * 1e-3 / (num - 1)
    gigabytes = incoming.boundary.num_bytes / 1e9
    say(f"both ways at once: {gigabytes / seconds:.0f} GB/s into this rank")


if __name__ == "__main__":
    sys.exit(main())
