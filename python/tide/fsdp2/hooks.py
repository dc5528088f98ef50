"""The three module globals of FSDP2 that carry its communication, and the packing of the third.

They are looked up at call time, so one assignment serves every model; each call is ours or stock's by its parameters.
"""

from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module

from tide.fsdp2 import binding as binding_module
from tide.fsdp2 import support

_users = 0
_STREAM = support.SIGNATURES["foreach_all_gather"].split().index("all_gather_stream") - 1
_before = {}


def _owner(fsdp_params):
    tied = fsdp_params[0].__dict__.get("_tide") if fsdp_params else None
    return tied[0] if tied else None


def _all_gather(fsdp_params, *args, **kwargs):
    owner = _owner(fsdp_params)
    if owner is not None:
        if owner.on_tide:
            return owner.all_gather(kwargs["all_gather_stream"] if "all_gather_stream" in kwargs else args[_STREAM])
        owner.counters.all_gathers += 1
    return _before["foreach_all_gather"](fsdp_params, *args, **kwargs)


def _copy_out(all_gather_result, fsdp_params, group, *args, **kwargs):
    owner = _owner(fsdp_params)
    if owner is not None and owner.on_tide:
        return owner.wait()
    return _before["foreach_all_gather_copy_out"](all_gather_result, fsdp_params, group, *args, **kwargs)


def _reduce(fsdp_params, unsharded_grads, *args, **kwargs):
    owner = _owner(fsdp_params)
    if owner is not None:
        if owner.on_tide:
            return owner.reduce(fsdp_params, unsharded_grads, args, kwargs)
        owner.counters.reduce_scatters += 1
    return _before["foreach_reduce"](fsdp_params, unsharded_grads, *args, **kwargs)


_OURS = [
    (group_module, "foreach_all_gather", _all_gather),
    (group_module, "foreach_all_gather_copy_out", _copy_out),
    (group_module, "foreach_reduce", _reduce),
    (collectives, "foreach_reduce_scatter_copy_in", binding_module.copy_in),
]


def acquire():
    """Puts the hooks in place for the first installation."""
    global _users
    _users += 1
    if _users == 1:
        for module, name, ours in _OURS:
            _before[name] = getattr(module, name)
            setattr(module, name, ours)


def drop():
    """Restores what was there after the last one, unless someone else has wrapped ours since: then ours stays and
    passes on."""
    global _users
    _users -= 1
    if _users == 0:
        for module, name, ours in _OURS:
            if getattr(module, name) is ours:
                setattr(module, name, _before[name])
