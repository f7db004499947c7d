"""Records of benches: whole or not at all, also of a bench that is told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppruntime.launch.records import write_record

ROOT = Path(__file__).parents[2]
BENCH = """
import sys, time
from pathlib import Path
from ppruntime.launch.records import end_in_order, write_record

end_in_order()
rows = []
try:
    for row in range(1000):
        rows.append(row)
        print(row, flush=True)
        time.sleep(0.01)
finally:
    write_record(Path(sys.argv[1]), {"rows": rows})
"""


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_told_to_end_leaves_what_it_has(sent, tmp_path):
    out = tmp_path / "deep" / "record.json"
    run = "import sys; from ppruntime.launch.records import run_python; run_python(sys.argv[1:])"
    with start("-c", run, "-c", BENCH, str(out)) as process:
        for _ in range(3):
            assert process.stdout.readline()
        process.send_signal(sent)
        process.wait(20)
    assert json.loads(out.read_text())["rows"][:3] == [0, 1, 2]


def test_a_second_signal_does_not_break_off_what_is_written(tmp_path):
    out = tmp_path / "record.json"
    slow = BENCH.replace("finally:", "finally:\n    print('ends', flush=True); time.sleep(0.5)")
    with start("-c", slow, str(out)) as process:
        assert process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        while process.stdout.readline() != "ends\n":
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
    assert json.loads(out.read_text())["rows"]


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path):
    out = tmp_path / "record.json"
    write_record(out, {"rows": [1]})
    with pytest.raises(TypeError):
        write_record(out, {"rows": [object()]})
    assert json.loads(out.read_text()) == {"rows": [1]}
    assert list(tmp_path.iterdir()) == [out]
