"""The `tide demo`: a small GPT trained with FSDP2 three times, with and without TIDE, on processes of this machine.

    stock        FSDP2's own collectives over gloo, metered
    tide         the same after `tide_triton.attach`
    reference    stock all-gathers, and reduce-scatters that add in rank order: TIDE must equal it bit for bit

    data.py         the text, and each rank's windows of it
    model.py        the GPT, with sizes that do not divide by the number of ranks
    memory.py       the communication buffers that stock FSDP2 holds
    training.py     one training, its losses and what it moved          (these four import torch, on the ranks alone)
    processes.py    ranks as processes, their messages and their ends
    runner.py       the three trainings on all ranks
    results.py      what came out, as JSON
    show.py         progress, tables, verdicts and the plot
    files.py        whether results can be written, asked before any process starts

What the numbers mean:

- A loss is the mean over the ranks, in rank order and float64, of each rank's own mean cross-entropy in the step.
- Calls and bytes are sums over the ranks, counted as the collectives ran. `peak_buffer_bytes` is the sum over the ranks
  of each rank's peak: what it holds for stock says `memory.py`, and for TIDE it is all windows, which live throughout.
- Two ranks add in one order only, so there TIDE equals stock bit for bit. From three ranks on, gloo adds in an order of
  its own. Sums of a few bf16 gradients are mostly exact in fp32 whatever the order, so that only few gradients differ,
  in their last bits, and losses are still equal for many steps: in a run of 200 on 4 ranks until the 84th, after which
  they parted by up to 2e-4 of their value. The reference, not stock, is what TIDE is held to.
- `seconds` are wall seconds of the slowest rank in all steps but the first, on CPU cores that the ranks share: they say
  nothing about GPUs. gloo sends through sockets, TIDE's host transport through shared memory, and only the stock run's
  buffers are watched. On GPUs, time is won by copy engines and freed SMs, of which a CPU has neither; see `bench/`.
"""
