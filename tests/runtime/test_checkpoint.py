"""A checkpoint loads bitwise at any cut, or says what is wrong before a tensor is touched."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from small_runs import checkpoint_digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ppruntime import checkpoint, manifest
from ppruntime.checkpoint import load, save
from ppruntime.manifest import CheckpointError, TrainingState, check_files, find, read_state
from ppruntime.messages import first_complaint, gather_bytes
from ppruntime.optim import make_adamw, state_tensors

SHAPES = {
    **{f"layers.{i}.attn.w": ((5 + i, 4), torch.float32) for i in range(6)},
    **{f"optim.exp_avg.layers.{i}.attn.w": ((5 + i, 4), torch.float32) for i in range(6)},
    **{f"optim.step.layers.{i}.attn.w": ((), torch.float32) for i in range(6)},
    **{f"layers.{i}.mlp.gate.bias": ((3,), torch.bfloat16) for i in range(6)},
    "embed.weight": ((9, 4), torch.float32),
    "layers.0.row": ((1, 4), torch.float32),
    "layers.0.engram.counts": ((2, 2), torch.int64),
}


def _tensor(name, step=1):
    shape, dtype = SHAPES[name]
    torch.manual_seed(1000 * step + list(SHAPES).index(name))
    return (100 * torch.randn(shape)).to(dtype)


def _tensors(names=tuple(SHAPES), step=1):
    return {name: _tensor(name, step) for name in names}


def _empty(names=tuple(SHAPES)):
    return {name: torch.full_like(_tensor(name), -1) for name in names}


def _state(step):
    return TrainingState(
        step=step, data_cursor=16 * step, tokens=512 * step, config_digest="c0ffee", layout="pp 4"
    )


def _assert_equal(tensors, step=1):
    for name, tensor in tensors.items():
        wanted = _tensor(name, step)
        assert tensor.dtype is wanted.dtype
        assert torch.equal(tensor, wanted), name


def _share(rank, num_ranks):
    return tuple(SHAPES)[rank::num_ranks]


def test_the_digest_of_a_run_is_of_its_numbers_and_of_nothing_else(tmp_path):
    def digest(name, tensors):
        save(tmp_path / name / "ckpt", tensors, _state(1), group=None)
        return checkpoint_digest(tmp_path / name)

    told = [digest(f"same {n}", _tensors()) for n in range(4)]
    assert len(set(told)) == 1
    changed = _tensors()
    changed["layers.2.mlp.gate.bias"].view(torch.int16)[1] ^= 1
    assert digest("changed", changed) != told[0]


# --- any cut -------------------------------------------------------------------------------------


def _save_share(rank, num_ranks, folder):
    dist.init_process_group("gloo")
    # A tensor on two ranks is stored once; a rank may hold nothing at all.
    names = _share(rank, num_ranks - 1) if rank < num_ranks - 1 else ("embed.weight",)
    path = save(folder, _tensors(names), _state(1), group=dist.group.WORLD)
    dist.destroy_process_group()
    return path


def _load_share(rank, num_ranks, path):
    dist.init_process_group("gloo")
    tensors = _empty(_share(rank, num_ranks))
    state = load(path, tensors, group=dist.group.WORLD)
    dist.destroy_process_group()
    return state, tensors


def test_what_four_ranks_save_two_ranks_and_one_process_load_bitwise(run_ranks, tmp_path):
    folder = tmp_path / "ckpt"
    assert len(set(run_ranks(4, _save_share, 4, folder))) == 1
    path = find(folder).latest
    assert path == folder / "step-00000001"

    tensors = _empty()
    assert load(path, tensors, group=None) == _state(1) == read_state(path)
    _assert_equal(tensors)
    for state, tensors in run_ranks(2, _load_share, 2, path):
        assert state == _state(1)
        _assert_equal(tensors)


def _save_shards(rank, folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    names = _share(mesh.get_local_rank("pp"), 2)
    tensors = {
        name: distribute_tensor(tensor, mesh["dp"], [Shard(0)]) if tensor.dim() else tensor
        for name, tensor in _tensors(names).items()
    }
    save(folder, tensors, _state(1), group=dist.group.WORLD)
    dist.destroy_process_group()


def _load_shards(rank, num_ranks, path):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (num_ranks,))
    tensors = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor
        for name, tensor in _empty().items()
    }
    load(path, tensors, group=dist.group.WORLD)
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }
    dist.destroy_process_group()
    return whole


def test_shards_of_two_data_ranks_load_whole_and_over_three(run_ranks, tmp_path):
    run_ranks(4, _save_shards, tmp_path)
    path = find(tmp_path).latest
    tensors = _empty()
    load(path, tensors, group=None)
    _assert_equal(tensors)
    for tensors in run_ranks(3, _load_shards, 3, path):
        _assert_equal(tensors)


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.wide, self.tall = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.tall(self.wide(x))


def _trained(model):
    params = dict(model.named_parameters())
    optimizer = make_adamw(params, lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**params, **state_tensors(optimizer, params)}


def _save_fsdp(rank, folder):
    dist.init_process_group("gloo")
    model = _Layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    save(folder, _trained(model), _state(2), group=dist.group.WORLD)
    dist.destroy_process_group()


def test_fsdp_weights_and_moments_load_in_one_process(run_ranks, tmp_path):
    run_ranks(2, _save_fsdp, tmp_path)
    wanted = _trained(_Layers())
    tensors = {name: torch.full_like(tensor, 9).detach() for name, tensor in wanted.items()}
    load(find(tmp_path).latest, tensors, group=None)
    assert len(tensors) == 4 * (1 + 3)
    for name, tensor in tensors.items():
        # Both data ranks saw the same batch, so their mean gradient is that of one process.
        torch.testing.assert_close(tensor, wanted[name].detach(), rtol=1e-6, atol=1e-7)


def test_large_shares_are_written_as_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 256)
    path = save(tmp_path, _tensors(), _state(1), group=None)
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 3
    with safe_open(files[0], "pt") as first:
        assert 1 <= len(first.keys()) < len(SHAPES)
    tensors = _empty()
    load(path, tensors, group=None)
    _assert_equal(tensors)


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, _tensors(), _state(1), group=None)


def _refused(path, match, names=tuple(SHAPES), **options):
    tensors = _empty(names)
    with pytest.raises(CheckpointError, match=match):
        load(path, tensors, group=None, **options)
    for name, tensor in tensors.items():
        assert bool((tensor == -1).all()), f"{name} was touched"


def _shard(path):
    (file,) = path.glob("*.safetensors")
    return file


def test_any_flipped_bit_in_any_file_is_refused(saved):
    rng = random.Random(7)
    for file in sorted(saved.iterdir()):
        whole = file.read_bytes()
        for _ in range(20):
            at = rng.randrange(len(whole))
            damaged = bytearray(whole)
            damaged[at] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            if file.name == "manifest.json" and json.loads(whole) == _json_or_none(damaged):
                continue  # the bit is between two values and changes nothing
            _refused(saved, rf"{file.name}.*(sha256|cannot be read|format|no plain)")
        file.write_bytes(whole)
    load(saved, _empty(), group=None)


def _json_or_none(text):
    try:
        return json.loads(bytes(text))
    except ValueError:
        return None


def test_truncated_missing_and_stray_files_are_named_with_what_was_wanted(saved):
    shard = _shard(saved)
    whole = shard.read_bytes()
    for cut in (1, 200, len(whole)):
        shard.write_bytes(whole[:-cut])
        _refused(saved, rf"{shard.name} has {len(whole) - cut} bytes.*says {len(whole)}")
        _refused(saved, rf"{shard.name} has", verify="sizes")
    shard.unlink()
    _refused(saved, rf"{shard.name} is missing, {len(whole)} bytes")
    shard.write_bytes(whole)
    (saved / "shard-9.safetensors").write_bytes(whole)
    _refused(saved, r"shard-9\.safetensors is not in the manifest")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[1, 2]", "cannot be read"),
        (lambda text: text.replace('"format_version": 1', '"format_version": 7'), "format 7"),
        (lambda text: text.replace('"step": 1', '"step": 2'), "sha256"),
        (lambda text: text.replace('"state.json"', '"../state.json"'), "sha256"),
    ],
)
def test_a_manifest_that_is_not_the_one_written_is_refused(saved, change, match):
    file = saved / "manifest.json"
    file.write_text(change(file.read_text()))
    _refused(saved, match)


def test_a_sealed_manifest_cannot_name_files_elsewhere(saved):
    found = manifest.read_manifest(saved)
    entry = manifest.FileEntry("../../secret", 1, "00")
    sealed = manifest.Manifest(1, 1, 1, "2.13", (*found.files, entry)).seal()
    (saved / "manifest.json").write_text(json.dumps(_as_json(sealed)))
    _refused(saved, "no plain file name")


def _as_json(sealed):
    import msgspec

    return msgspec.to_builtins(sealed)


def test_a_renamed_checkpoint_is_refused(saved):
    moved = saved.rename(saved.with_name("step-00000009"))
    _refused(moved, "holds step 1")


def test_no_planted_pickle_is_ever_read(saved, monkeypatch):
    (saved / ".metadata").write_bytes(b"cos\nsystem\n(S'touch planted'\ntR.")
    _refused(saved, r"\.metadata is not in the manifest")

    def unpickled(*_, **__):
        raise AssertionError("something was unpickled")

    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, unpickled)
    load(saved, _empty(), group=None, verify="off")
    assert not (Path.cwd() / "planted").exists()


def test_another_model_is_refused_with_the_names_that_differ(saved):
    names = [name for name in SHAPES if name != "embed.weight"]
    _refused(saved, r"another model: only the checkpoint has embed\.weight", names)

    tensors = {**_empty(), "layers.9.attn.w": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"only this model has layers\.9\.attn\.w"):
        load(saved, tensors, group=None)
    tensors = {**_empty(), "embed.weight": torch.zeros(9, 5)}
    with pytest.raises(CheckpointError, match=r"embed\.weight is \[9, 4\].* and \[9, 5\]"):
        load(saved, tensors, group=None)
    tensors = {**_empty(), "embed.weight": torch.zeros(9, 4, dtype=torch.float64)}
    with pytest.raises(CheckpointError, match=r"float32 there and .*float64 here"):
        load(saved, tensors, group=None)


def test_another_residual_type_is_refused_by_its_name(saved):
    match = (
        r'was written with model\.residual_type = "mhc", this model has "gated", whose parameters '
        r'are others; go on with "mhc", or start a new run'
    )
    _refused(saved, match, residual_type="gated")
    state = load(saved, _empty(), group=None, residual_type="mhc")
    assert state.residual_type == "mhc"


def _load_with_a_stranger(rank, path):
    dist.init_process_group("gloo")
    names = _share(rank, 3)
    tensors = _empty(names)
    if rank == 1:
        tensors["layers.9.attn.w"] = torch.zeros(2)
    if rank == 2:
        del tensors[names[0]]
    try:
        load(path, tensors, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return None


def test_all_ranks_raise_the_same_error_when_one_cannot_load(run_ranks, saved):
    texts = run_ranks(3, _load_with_a_stranger, saved)
    assert len(set(texts)) == 1
    assert f"only the checkpoint has {_share(2, 3)[0]}" in texts[0]


def _load_damaged(rank, path):
    dist.init_process_group("gloo")
    tensors = _empty(_share(rank, 4))
    try:
        load(path, tensors, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error), all(bool((tensor == -1).all()) for tensor in tensors.values())
    finally:
        dist.destroy_process_group()
    return None


def test_damage_found_by_one_rank_stops_all(run_ranks, tmp_path):
    run_ranks(4, _save_share, 4, tmp_path)
    path = find(tmp_path).latest
    file = sorted(path.glob("*.safetensors"))[2]
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 4
    file.write_bytes(damaged)
    results = run_ranks(4, _load_damaged, path)
    assert all(file.name in text and "sha256" in text and clean for text, clean in results)
    assert len(set(results)) == 1


# --- a save that dies ----------------------------------------------------------------------------

POINTS = (
    "checkpoint._begin",
    "checkpoint._write_tensors",
    "checkpoint.flushed_entry",
    "manifest._write_json",
    "manifest.flushed_entry",
    "manifest._flush_folder",
    "checkpoint._prune",
)


class Died(BaseException):
    """Stands for the end of a process."""


def _dying(function, call, when, die):
    """The function, ending its process before or after its n-th call."""
    calls = iter(range(1000))

    def wrapped(*args, **kwargs):
        last = next(calls) == call
        if last and when == "before":
            die()
        result = function(*args, **kwargs)
        if last and when == "after":
            die()
        return result

    return wrapped


def _bytes_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def _check_old_or_new(folder, old_bytes):
    found = find(folder)
    for path in found.committed:
        check_files(path)
        tensors = _empty()
        state = load(path, tensors, group=None)
        _assert_equal(tensors, state.step)
    assert found.latest.name in ("step-00000002", "step-00000003")
    assert _bytes_of(folder / "step-00000002") == old_bytes
    return found


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_an_exception_during_a_save_leaves_the_old_or_the_new_and_no_litter(
    tmp_path, monkeypatch, point, when
):
    for step in (1, 2):
        save(tmp_path, _tensors(step=step), _state(step), group=None)
    old_bytes = _bytes_of(tmp_path / "step-00000002")

    def die():
        raise Died

    module, name = point.split(".")
    owner = {"checkpoint": checkpoint, "manifest": manifest}[module]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _dying(getattr(owner, name), 0, when, die))
        with pytest.raises(Died):
            save(tmp_path, _tensors(step=3), _state(3), group=None, keep_last=2)
    found = _check_old_or_new(tmp_path, old_bytes)
    assert not found.incomplete
    if found.latest.name == "step-00000002":
        save(tmp_path, _tensors(step=3), _state(3), group=None, keep_last=2)
    _check_old_or_new(tmp_path, old_bytes)


def _die_in_save(rank, folder, point, when, call):
    module, name = point.split(".")
    owner = {"checkpoint": checkpoint, "manifest": manifest}[module]

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, _dying(getattr(owner, name), call, when, die))
    save(folder, _tensors(step=3), _state(3), group=None, keep_last=2)


@pytest.mark.parametrize(
    ("point", "when", "call"),
    [
        ("checkpoint._begin", "after", 0),
        ("checkpoint._write_tensors", "after", 0),
        ("manifest._write_json", "after", 0),
        ("manifest._write_json", "after", 1),
        ("manifest._flush_folder", "before", 1),
        ("checkpoint._prune", "before", 0),
    ],
)
def test_a_kill_during_a_save_leaves_the_old_or_the_new(rank_outcomes, tmp_path, point, when, call):
    for step in (1, 2):
        save(tmp_path, _tensors(step=step), _state(step), group=None)
    old_bytes = _bytes_of(tmp_path / "step-00000002")
    (outcome,) = rank_outcomes(1, _die_in_save, tmp_path, point, when, call)
    assert outcome.exit_code == -signal.SIGKILL
    found = _check_old_or_new(tmp_path, old_bytes)
    committed = found.latest.name == "step-00000003"
    assert committed == ((point, call) in {("manifest._flush_folder", 1), ("checkpoint._prune", 0)})
    assert len(found.incomplete) == (not committed)


def _one_rank_cannot_write(rank, folder):
    dist.init_process_group("gloo")
    if rank == 1:

        def full(*_):
            raise OSError(28, "No space left on device", "shard")

        checkpoint.flushed_entry = full
    try:
        save(folder, _tensors(_share(rank, 3)), _state(1), group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return None


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(run_ranks, tmp_path):
    folder = tmp_path / "ckpt"
    texts = run_ranks(3, _one_rank_cannot_write, folder)
    assert texts == ["rank 1: No space left on device (shard)"] * 3
    assert list(folder.iterdir()) == []


def _disk_fills_up(rank, folder):
    dist.init_process_group("gloo")
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    big = {f"layers.{rank}.w": torch.zeros(64, 64)}
    try:
        save(folder, big, _state(1), group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return None


def test_a_disk_that_fills_up_in_mid_write_is_one_sentence_on_every_rank(run_ranks, tmp_path):
    assert run_ranks(2, _disk_fills_up, tmp_path) == ["rank 1: File too large"] * 2
    assert list(tmp_path.iterdir()) == []


# --- the folder ----------------------------------------------------------------------------------


def test_only_the_newest_are_kept_and_only_after_the_new_one_is_there(tmp_path):
    for step in range(1, 6):
        save(tmp_path, _tensors(("embed.weight",), step), _state(step), group=None, keep_last=2)
    assert [path.name for path in find(tmp_path).committed] == ["step-00000004", "step-00000005"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    with pytest.raises(ValueError, match="keep at least 2"):
        save(tmp_path, {}, _state(6), group=None, keep_last=1)


def test_an_old_one_that_cannot_be_deleted_is_told_and_costs_nothing(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, _tensors(step=step), _state(step), group=None)

    def busy(path):
        raise OSError(16, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", busy)
        with pytest.warns(RuntimeWarning, match=r"not deleted: .*busy"):
            save(tmp_path, _tensors(step=3), _state(3), group=None, keep_last=2)
    assert len(find(tmp_path).committed) == 2
    save(tmp_path, _tensors(step=4), _state(4), group=None, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_what_was_not_committed_is_never_the_latest_and_is_reported(tmp_path, saved):
    (tmp_path / "step-00000007").mkdir()
    (tmp_path / "step-00000007" / "shard.safetensors").write_bytes(b"x")
    (tmp_path / ".tmp-step-8-abc").mkdir()
    (tmp_path / "step-00000009").symlink_to(saved)
    (tmp_path / "notes.txt").write_text("mine")
    found = find(tmp_path)
    assert found.latest == saved
    assert {p.name for p in found.incomplete} == {
        "step-00000007",
        ".tmp-step-8-abc",
        "step-00000009",
    }
    assert find(tmp_path / "nowhere").latest is None


def test_a_step_is_saved_once_and_the_first_save_stays(saved):
    before = _bytes_of(saved)
    with pytest.raises(CheckpointError, match="step-00000001 is there already"):
        save(saved.parent, _tensors(step=2), _state(1), group=None)
    assert _bytes_of(saved) == before


def test_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs 0\.0 MB, 0\.0 MB are free"):
        save(tmp_path, _tensors(), _state(1), group=None)
    assert list(tmp_path.iterdir()) == []


def test_files_are_closed_to_others(saved):
    assert {file.stat().st_mode & 0o777 for file in saved.iterdir()} == {0o600}
    assert saved.stat().st_mode & 0o777 == 0o700


# --- messages ------------------------------------------------------------------------------------


def _exchange(rank):
    dist.init_process_group("gloo")
    payloads = gather_bytes(bytes(range(rank * 3)), dist.group.WORLD)
    nobody = gather_bytes(b"", dist.group.WORLD)
    complaint = first_complaint("rank 1 says no" if rank else None, dist.group.WORLD)
    none = first_complaint(None, dist.group.WORLD)
    dist.destroy_process_group()
    return payloads, nobody, complaint, none


def test_messages_of_any_length_reach_every_rank(run_ranks):
    for payloads, nobody, complaint, none in run_ranks(2, _exchange):
        assert payloads == [b"", bytes(range(3))]
        assert nobody == [b"", b""]
        assert complaint == "rank 1 says no"
        assert none is None
    assert gather_bytes(b"abc", None) == [b"abc"]
