"""What many GPUs will do, from what few did: MFU, step, days, cost.

    projector           the arithmetic: start here, at `Job`
    pipeline            a pipeline's step from the times of its parts, in virtual time
    simulate            the same on a cluster that is not ideal
    step_memory         what ranks hold meanwhile: the memory ledger, in time
    calibration         the file of times that both read; `calibration_file` writes it
    step_pieces         what was timed once a step on one layout, on another
    calibrate           times a model's units; `calibrate_step` and `calibrate_traffic` the rest
    calibrate_kernels   a unit's times from kernels measured alone; `kernel_records` reads them
    planner             cut, recompute mode and order with the shortest step that fits; with
                        `planner_task`, `planner_inputs` and `planner_cut`
    planner_ledger      holds what the planner finds to the memory ledger
    headline            V4.1-Flash from the kernels as they are recorded today

`calibrate`, its `_step` and `_traffic` and `calibration_file` load torch, the others do not. This
file imports nothing.
"""
