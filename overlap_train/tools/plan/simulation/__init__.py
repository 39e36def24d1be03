"""What the ranks of a machine do in a pass, by its plan, and when: the kernels and sends of each, simulated together.

    work.py                     a pass, its plan, and how long its products and transfers take on that machine
    programs.py, backward.py    what a rank enqueues: kernels, waits and sends in order
    by_library.py, sending.py   products by the library; what is sent
    across_nodes.py             the part of it between nodes
    enqueued.py                 the order of kernels, exchanges and arrivals where streams share a hardware queue
    copies.py                   passes over memory, of Ulysses' attentions and of copies
    persistent_tiles.py         the tiles of a persistent kernel, and what each waits for
    timeline.py                 programs, and what happened when
    hardware_queue.py           that queue, and who comes first to the SMs
    clock.py                    what happens next, and what has happened
    simulated_rank.py           one rank's SMs, copy engine and links
    simulate.py                 all ranks, until everything has ended

Orders are the schedule's (overlap_train/planning/schedule), which the operators execute.
"""
