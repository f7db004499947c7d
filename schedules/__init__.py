"""The schedules room: what every rank of a pipeline does, in which order, as plain data.

Standard library only: no torch, no configuration, no other room. To read it, start at `ops` (op,
pair, schedule), then `one_f_one_b` for an order, `passes` for what is done to one, `check` for what
makes one legal, `timeline` for what it costs.

Data          ops             kinds of op, their text form, `Schedule`
              placement       stage to rank: loop and V
              formats         CSV, JSON, digest
Orders        orders          the names; `make`
              one_f_one_b     GPipe, 1F1B with any warm-up, interleaved 1F1B
              zero_bubble     ZB-H1, ZB-H2, interleaved ZB1P, ZB-V
              v_schedules     V-Half, V-Min
              dualpipe_v      DualPipeV
              order_writer    one rank's order, written chunk by chunk
Passes        passes          split backward, merge, transfers, frees, offload
              forward_only    the forwards of an order, for evaluation
              lanes           pairs whose halves run at once: what waits for what
Legal?        check           one function a rule; check_lowered: rules for transfers and buffers
              positions       where each op stands
              progress        runs an order without times: who waits for whom; slots needed
              counts          activations in flight, transfers, slots held
              credits         channels whose slots are free in time by the order alone
              grid            the table below an error
How long?     costs           what ops, hops and activations cost
              virtual_time    plays an order in time: when each entry runs, what held it up
              timeline        when each op runs; bubbles, memory, critical path
              law             the steady state in closed form
              plan_warmup     the smallest warm-up within a budget
              formulas        bubbles and memory as text
              longest_path    the same as a path through a graph, to hold the others against
Real ones     machine         links, interference, noise, host copies, a step's end
              simulator       plays an order on one, event by event
              simulated_step  what happened in it, where time went, the critical path
              noise           what ops take under jitter, stragglers and stalls
              absent          ranks that are not there, beside those that run
Better ones   problem         an order's op classes
              bounds          what no order can beat
              list_scheduler  builds an order op by op in time
              search          from the handmade orders on, never worse
Pictures      draw            text, SVG, Chrome trace
              draw_memory     memory over one rank's ops
"""

from ppruntime.schedules.orders import NAMES, make

__all__ = ["NAMES", "make"]
