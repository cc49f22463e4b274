"""Benchmarks, importable and runnable: `python -m bench --help`.

| module         | what                                                                                   |
|----------------|----------------------------------------------------------------------------------------|
| cases          | which models and sizes are measured, cut from `tide_triton.models`                     |
| ranks          | one process per GPU, and what each knows about itself                                  |
| timing, trace  | time as the slowest rank's median; kernels, copies and SM-time from a profiler's trace |
| baselines      | stock, symm and limit: what TIDE is compared with                                      |
| kernels, all_gather, reduce_scatter, interference, step | one benchmark each: rows from `run`           |
| training       | the models that `step` trains                                                          |
| results, plots | rows as JSON with what they ran on, tables, bars                                       |

| baseline | what it is                                                                                       |
|----------|--------------------------------------------------------------------------------------------------|
| stock    | what FSDP2 does: foreach cast, copy-in, NCCL, copy-out; copy-in (`chunk_cat`) and NCCL           |
| symm     | the same with the communicated buffers in symmetric memory, and NCCL's zero-CTA policy           |
| limit    | a peer copy of the bytes that must cross the link; for steps the floor, training without FSDP   |
"""
