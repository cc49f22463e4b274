"""TIDE under FSDP2. This package alone knows FSDP2.

    internals.py    where FSDP2 keeps its groups, parameters and process groups, on torch 2.11 to 2.14
    tickets.py      tensors without storage that stand for FSDP2's flat buffers and record what it does with them
    params.py       FSDP2's parameter and parameter group, as they are while attached
    binding.py      one parameter group: its layout, its slot, its gathers
    group_reduce.py its reductions;  early.py  those that begin before FSDP2 asks for them
    slot_linear.py  linear layers that write weight gradients over the weights
    options.py      what `attach` was told
    comms.py        the all-gather and reduce-scatter that FSDP2 calls
    domain.py       the groups of one process group: transport, slots, and which group takes which
    attachment.py   attach, detach
    report.py       what went which way
    reference.py    FSDP2's own collectives, metered, and a reduce-scatter in rank order to compare with

How a group is gathered and reduced (FSDP2's steps on the left):

    foreach_all_gather            allocate() gives a ticket instead of a flat buffer; copy-in does nothing;
                                  the comm casts each shard into its place of the own slot and puts it to every peer
    foreach_all_gather_copy_out   waits for the peers' puts; the parameters already are where they belong
    post_backward                 gradients are wrapped so that they keep the parameter they belong to
    foreach_reduce                allocate() gives a ticket; `chunk_cat` does nothing; the comm puts slices from each
                                  gradient to their owners and sums them; FSDP2's own tail (HSDP all-reduce, hooks,
                                  division, cast, accumulation) goes on with the fresh output
"""

from tide_triton.fsdp.attachment import attach, detach, report
from tide_triton.fsdp.report import GroupReport, Report

__all__ = ["GroupReport", "Report", "attach", "detach", "report"]
