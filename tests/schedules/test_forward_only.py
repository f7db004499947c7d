from hypothesis import given
from hypothesis import strategies as st

from ppruntime.schedules import NAMES, make
from ppruntime.schedules.forward_only import forward_only
from ppruntime.schedules.ops import Kind, Op


@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 12))
def test_forward_only_keeps_every_forward_and_never_waits_for_what_comes_later(name, p, m):
    order = forward_only(make(name, p, m))
    position: dict[int, int] = {rank: 0 for rank in range(p)}
    done: set[Op] = set()
    ops = {rank: list(order.ops(rank)) for rank in range(p)}
    moved = True
    while moved:
        moved = False
        for rank in range(p):
            while position[rank] < len(ops[rank]):
                op = ops[rank][position[rank]]
                if op.kind is Kind.F and op.stage > 0:
                    if Op(op.stage - 1, Kind.SEND_F, op.micro_batch) not in done:
                        break
                    assert Op(op.stage, Kind.RECV_F, op.micro_batch) in done
                done.add(op)
                position[rank] += 1
                moved = True
    assert all(position[rank] == len(ops[rank]) for rank in range(p))
    assert {op for op in done if op.kind is Kind.F} == {
        Op(s, Kind.F, i) for s in range(order.num_stages) for i in range(m)
    }


@given(st.sampled_from(NAMES), st.integers(2, 6), st.integers(1, 9))
def test_forward_only_needs_one_slot_a_channel(name, p, m):
    order = forward_only(make(name, p, m))
    for rank in range(p):
        held: dict[int, int] = {}
        for op in order.ops(rank):
            held[op.stage] = (
                held.get(op.stage, 0) + (op.kind is Kind.RECV_F) - (op.kind is Kind.FREE_F)
            )
            assert held[op.stage] <= 1
        assert not any(held.values())
