"""What torch's allocator leaves of a GPU to others."""

from __future__ import annotations

import pytest
import torch

from ppruntime.device_room import ROOM_BYTES, leave_room, share_of_device

GB = 1 << 30


def test_the_allocator_may_have_all_but_what_others_have_and_some_room():
    share = share_of_device(free=100 * GB, total=140 * GB, reserved=30 * GB)
    assert share * 140 * GB == pytest.approx(130 * GB - ROOM_BYTES)


def test_an_allocator_that_has_nearly_all_keeps_what_it_has():
    share = share_of_device(free=ROOM_BYTES // 2, total=140 * GB, reserved=135 * GB)
    assert share * 140 * GB == pytest.approx(135 * GB)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_driver_still_has_room_when_the_allocator_has_run_out(monkeypatch):
    device, held = torch.device("cuda", torch.cuda.current_device()), []
    torch.cuda.empty_cache()  # what earlier tests left unused counts as the allocator's
    room = torch.cuda.mem_get_info(device)[0] - 4 * GB  # others may test on this GPU
    monkeypatch.setattr("ppruntime.device_room.ROOM_BYTES", room)

    def take() -> None:
        while True:
            held.append(torch.empty(GB // 4, dtype=torch.uint8, device=device))

    try:
        leave_room(device)
        with pytest.raises(torch.OutOfMemoryError):
            take()
        assert 8 <= len(held) <= 16
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
