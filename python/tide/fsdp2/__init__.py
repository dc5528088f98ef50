"""TIDE under PyTorch FSDP2.

    fully_shard(model, ...)          # as before
    tide.fsdp2.install(model)        # once, on all ranks, before the first forward or between steps
    print(tide.fsdp2.report(model))  # what every parameter group runs on, and why

docs/fsdp2.md says what each argument does and what can go wrong; docs/support.md what is on TIDE and what stays on
stock.
"""

import os

from tide._lib import TideError
from tide.fsdp2.session import Counters, GroupReport, Installation, Report, installations

__all__ = ["Counters", "GroupReport", "Report", "TideError", "install", "report", "stats", "uninstall"]


def _flag(name):
    return os.environ.get(name, "0") not in ("", "0")


def install(model, *, strict=False, node_size=None, options=None, check_every=0, private=(), poison=False, fabric=None):
    """C  Puts the FSDP2 parameter groups of `model` on TIDE; returns report(model).

    strict       a group that would stay on stock FSDP2 is an error (also TIDE_STRICT=1)
    node_size    ranks a node, for virtual nodes; default: the machines decide (also TIDE_NODE_SIZE)
    options      knobs by name, as `tide help knobs` lists them; each also as TIDE_<KNOB>
    check_every  compare every n-th call of a group with stock FSDP2 (also TIDE_CHECK_EVERY); 0: never
    private      names of modules that get a landing of their own
    poison       fill released landings with 0xFF, so that a weight used after reshard shows
    fabric       "auto": CPU ranks: host; GPUs of one machine: cuda; of several: nccl; each also by name (also TIDE_FABRIC)

    TIDE_DISABLE=1 leaves every group on stock. Errors are TideErrors, alike on all ranks; nothing is then changed.
    """
    if model in installations:
        raise TideError("install: already installed on this model", -2)
    knobs = dict(options or {})
    if poison:
        knobs["poison"] = 1
    installations[model] = Installation(
        model,
        strict=strict or _flag("TIDE_STRICT"),
        node_size=node_size if node_size is not None else int(os.environ.get("TIDE_NODE_SIZE", "0")),
        options=knobs,
        check_every=check_every or int(os.environ.get("TIDE_CHECK_EVERY", "0")),
        private=private,
        asked=fabric or os.environ.get("TIDE_FABRIC") or "auto",
    )
    return report(model)


def _installation(model):
    found = installations.get(model)
    if found is None:
        raise TideError("tide.fsdp2 is not installed on this model", -2)
    return found


def uninstall(model, *, force=False):
    """C  Stock FSDP2 again: shards are copied out of the arena, every arena without a view of yours is freed.

    A gradient that has not been reduced (set_requires_gradient_sync(False), a backward that failed) is an error; with
    `force` such gradients are dropped.
    """
    found = _installation(model)
    found.teardown(force)
    found.pre_forward.remove()
    del installations[model]


def report(model):
    """L  A Report: one GroupReport a parameter group, in the order of execution. str() is a table."""
    return _installation(model).report()


def stats(model):
    """L  {"steps", "total", "last_step", "arena_bytes", "arena_in_torch", "live_views"}: Counters over all groups; a step
    begins with the model's forward. arena_in_torch: whether torch's memory counters contain the arenas."""
    found = _installation(model)
    infos = [comm.info for comm in found.comms]
    return {
        "steps": found.steps,
        "total": found.counters(),
        "last_step": found.counters() - found.at_step,
        "arena_bytes": sum(info.arena_bytes for info in infos),
        "arena_in_torch": bool(found.counted),
        "live_views": sum(info.live_views for info in infos),
    }
