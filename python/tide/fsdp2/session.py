"""One installation: which groups go on TIDE (the same on all ranks), their communicators and landings, and the way
back."""

import hashlib
import os
import re
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from tide import _lib
from tide import comm as tide_comm
from tide._lib import TideError, code_of
from tide.fsdp2 import exchange, fabric, hooks, memory, order, support
from tide.fsdp2.binding import Binding, Counters, Slot, Stock

installations = weakref.WeakKeyDictionary()  # module -> Installation


@dataclass
class GroupReport:
    """One row of report(): a parameter group of FSDP2."""

    module: str
    path: str  # "tide host M=2 L=2", or "stock"
    reason: str
    all_gathers: int  # calls enqueued by the engine; for stock groups, calls seen
    reduce_scatters: int
    landing: str  # "ring slot 0", "private: why", "-"
    shards: str  # "adopted", "cast from float32", "copied", "-"
    digest: int  # of the plan; the same on all ranks

    @property
    def on_tide(self):
        return self.path != "stock"


class Report(list):
    """GroupReports in the order of execution; str() is a table."""

    def __str__(self):
        rows = [("module", "path", "AG", "RS", "landing", "shards", "reason")]
        rows += [
            (g.module, g.path, str(g.all_gathers), str(g.reduce_scatters), g.landing, g.shards, g.reason) for g in self
        ]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]) - 1)]
        return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows)


def _environment():
    """Knobs from TIDE_<KNOB>."""
    return {
        name: int(os.environ[f"TIDE_{name.upper()}"]) for name in _lib.KNOBS if f"TIDE_{name.upper()}" in os.environ
    }


class Installation:
    def __init__(self, model, strict, node_size, options, check_every, private, asked):
        self.model, self.asked = weakref.ref(model), fabric.check(asked)
        self.strict, self.node_size, self.options = strict, node_size, {**_environment(), **(options or {})}
        self.check_every, self.private = check_every, tuple(private)
        tide_comm.make_options(self.options)  # a bad knob is an error before anything else happens
        self.bindings, self.comms, self.counted = [], [], []
        self.landing, self.slot, self.kept = {}, {}, {}
        self.fabric, self.not_node_major = {}, {}  # by group: its fabric; why its nodes are single ranks, or None
        self.steps, self.at_step, self.last_step = 0, Counters(), Counters()
        self.retired = Counters()  # of bindings that a new plan replaced
        self.setup()
        self.pre_forward = model.register_forward_pre_hook(self._before_forward, prepend=True)

    # ---- setting up --------------------------------------------------------------------------------------------------

    def setup(self):
        """C  Every rank of the mesh."""
        self.units, self.roots = order.find_units(self.model())
        groups = [(group, self._label(unit, group)) for unit in self.units for group in unit.groups]
        if not groups:
            raise TideError("install: the model has no fully_shard'ed module", code_of("TIDE_ERR_ARGUMENT"))
        known = {name for unit in self.units for name in unit.names}
        if unknown := [name for name in self.private if name not in known]:
            raise TideError(
                f"install: private: {unknown[0]!r} is not a fully_shard'ed module", code_of("TIDE_ERR_ARGUMENT")
            )
        self.plan = self._fingerprint()
        reasons = self._agree(groups, {})
        self._be_strict(groups, reasons)
        for group, _ in groups:
            group._to_sharded()
        try:
            made, reasons = self._make_all(groups, reasons)
        except BaseException:
            self._destroy_comms()
            raise
        lasting = self._lasting(made)
        for group, name in groups:
            if group in made:
                handle, spec = made[group]
                self.bindings.append(
                    Binding(
                        name,
                        group,
                        handle,
                        spec,
                        spec.landing == tide_comm.LANDING_PRIVATE,
                        self.check_every,
                        int(self.options.get("mode", 0)),
                        self.slot[group],
                        group in lasting,
                    )
                )
            else:
                stock = Stock(name, reasons[group])
                self.bindings.append(stock)
                for index, p in enumerate(group.fsdp_params):
                    p._tide = (stock, index)
        for binding in self.bindings:
            if binding.on_tide and binding.adopts:
                binding.adopt()
        if os.environ.get("TIDE_TORCH_MEMORY", "0") not in ("", "0"):
            self._count_arenas()
        hooks.acquire()

    def _count_arenas(self):
        """Torch counts the arenas on GPUs from here on."""
        devices = {b.group.comm: b.device for b in self.bindings if b.on_tide and b.on_cuda}
        for comm, device in devices.items():
            address, _ = comm.groups[0].tensor(tide_comm.TENSOR_PARAM, 0)
            self.counted.append(memory.Counted(address, comm.info.arena_bytes, device))

    def _lasting(self, made):
        """Groups that keep what was gathered for their forward until their backward. None with poison: that is there to
        show who uses a landing after its reshard."""
        if int(self.options.get("poison", 0)):
            return set()
        events = order.play_step(self.roots, order.units_by_group(self.units))
        return order.lasting(events, {group: self.slot[group] for group in made})

    def _be_strict(self, groups, reasons):
        if self.strict and any(reasons.values()):
            raise TideError(
                "install(strict=True): "
                + "; ".join(f"{name}: {reasons[group]}" for group, name in groups if reasons[group]),
                code_of("TIDE_ERR_UNSUPPORTED"),
            )

    def _make_all(self, groups, reasons):
        """({group: (handle, spec)}, reasons). What the library refuses, a communicator (no peer access, an NCCL that is too
        old) or a group of it (too many puts), leaves its groups on stock, HSDP's replicas of them too."""
        made, refused, comms = {}, {}, {}
        for pg, members in self._by_process_group(groups, reasons).items():
            some = self._make_groups(pg, members, refused)
            made.update(some)
            if some:
                comms[pg] = self.comms[-1]
        agreed = self._agree(groups, refused)
        self._be_strict(groups, agreed)
        for pg, members in self._by_process_group(groups, reasons).items():
            was = [member for member in members if member[0] in made]
            stay = [member for member in was if agreed[member[0]] is None]
            if len(stay) < len(was):
                for group, _ in was:
                    del made[group]
                self.comms.remove(comms[pg])
                comms[pg].destroy()
                if stay:
                    made.update(self._make_comm(pg, stay))
        return made, agreed

    @staticmethod
    def _label(unit, group):
        name = ", ".join(name or "(root)" for name in unit.names)
        return name if len(unit.groups) == 1 else f"{name} [group {unit.groups.index(group)}]"

    def _fingerprint(self):
        """What a plan rests on and a user may change between steps: what is kept unsharded, and the prefetch lists. A
        group that was kept once counts as kept, so that a loop that turns reshard_after_backward on and off is planned
        for once."""
        for unit in self.units:
            for group in unit.groups:
                if why := unit.why_kept(group):
                    self.kept.setdefault(group, why)
        position = {unit.state: k for k, unit in enumerate(self.units)}
        return [
            (
                tuple(group in self.kept for group in unit.groups),
                tuple(position.get(s, -1) for s in unit.state._states_to_forward_prefetch),
                tuple(position.get(s, -1) for s in unit.state._states_to_backward_prefetch),
            )
            for unit in self.units
        ]

    def _agree(self, groups, refused):
        """{group: why it stays on stock, or None}: one answer for all ranks of its mesh, HSDP's replicas included.
        refused: {group: reason} of those whose communicator could not be made."""
        disabled = "TIDE_DISABLE is set" if os.environ.get("TIDE_DISABLE", "0") not in ("", "0") else None
        mine = {}
        for group, name in groups:
            busy = [p for p in group.fsdp_params if p.unsharded_accumulated_grad is not None]
            if busy:
                raise TideError(
                    f"install: {name} holds a gradient that has not been reduced: install between steps",
                    code_of("TIDE_ERR_STATE"),
                )
            mine[group] = (
                disabled
                or refused.get(group)
                or support.group_reason(group)
                or fabric.misfit(self.asked, group.device.type)
            )
        for kind in (FSDPMeshInfo, HSDPMeshInfo):
            process_groups = {}
            for group, name in groups:
                if isinstance(group.mesh_info, kind):
                    pg = (
                        group.mesh_info.shard_process_group
                        if kind is FSDPMeshInfo
                        else group.mesh_info.replicate_process_group
                    )
                    process_groups.setdefault(pg, []).append((group, name))
            for pg, members in process_groups.items():
                told = [(name, _signature(group)) for group, name in members]
                why = [mine[group] for group, _ in members]
                ranks = dist.get_process_group_ranks(pg)
                everyone = exchange.of_objects(
                    pg, (_digest(told), why if any(why) else None, self.asked, fabric.machine())
                )
                digests, reasons, asked, machines = zip(*everyone)
                for rank, other in zip(ranks, asked):
                    if other != asked[0]:
                        raise TideError(
                            f"install: fabric: {other!r} on rank {rank}, {asked[0]!r} on rank {ranks[0]}",
                            code_of("TIDE_ERR_MISMATCH"),
                        )
                if len(set(digests)) > 1:
                    _raise_difference(ranks, exchange.of_objects(pg, told))
                for k, (group, _) in enumerate(members):
                    mine[group] = _one_reason(ranks, [theirs and theirs[k] for theirs in reasons])
                    if kind is FSDPMeshInfo:
                        self.fabric[group] = fabric.choose(self.asked, group.device.type, machines)
        return mine

    def _by_process_group(self, groups, reasons):
        """{process group: groups on TIDE, in order}: one communicator for each distinct set of ranks and kind of
        device."""
        result, known = {}, {}
        for group, name in groups:
            if reasons[group] is None:
                pg = group.mesh_info.shard_process_group
                key = known.setdefault((group.device.type, *dist.get_process_group_ranks(pg)), pg)
                result.setdefault(key, []).append((group, name))
        return result

    def _make_groups(self, process_group, members, refused):
        """{group: (handle, spec)} of those that the library takes; the others come into `refused` with its sentence."""
        while members:
            try:
                return self._make_comm(process_group, members)
            except TideError as error:
                if error.code != code_of("TIDE_ERR_UNSUPPORTED"):
                    raise
                named = _refused_group(error)
                out = members if named is None else [members[named]]
                refused.update((group, str(error)) for group, _ in out)
                members = [member for member in members if member not in out]
        return {}

    def _make_comm(self, process_group, members):
        ranks = dist.get_process_group_ranks(process_group)
        groups = [group for group, _ in members]
        size_of = _landing_size(len(ranks))
        ring, slots, why = order.choose_ring(
            self.units, self.roots, groups, size_of, self.kept, self.options.get("ring_slots"), self.private
        )
        specs = [_spec(group, name, group in ring) for group, name in members]
        device = 0
        if groups[0].device.type == "cuda":
            index = groups[0].device.index
            device = torch.cuda.current_device() if index is None else index
        local, not_node_major = _local_size(ranks, self.node_size)
        comm = tide_comm.Comm(
            process_group.rank(),
            len(ranks),
            exchange.of_bytes(process_group),
            node_size=local,
            options={**self.options, "ring_slots": slots},
            fabric=self.fabric[groups[0]],
            device=device,
        )
        self.comms.append(comm)
        try:
            made = comm.create_groups(specs)
        except TideError:
            self.comms.remove(comm)
            comm.destroy()
            raise
        shared = [Slot() for _ in range(slots)]
        for group in groups:
            self.slot[group] = shared[ring.index(group) % slots] if group in ring else Slot()
            self.landing[group] = (
                f"ring slot {ring.index(group) % slots}" if group in ring else f"private: {why[group]}"
            )
            self.not_node_major[group] = not_node_major
        return dict(zip(groups, zip(made, specs)))

    # ---- between steps -----------------------------------------------------------------------------------------------

    def _before_forward(self, module, args):
        total = self.counters()
        self.last_step, self.at_step = total - self.at_step, total
        self.steps += 1
        if self._fingerprint() != self.plan:  # set_reshard_after_forward, a prefetch list: a plan for what holds now
            pending = any(g._all_gather_result is not None for unit in self.units for g in unit.groups)
            if not pending and not any(b.on_tide and b.busy() for b in self.bindings):
                self.retired += sum((b.counters for b in self.bindings), Counters())
                self.teardown()
                self.setup()

    def counters(self):
        return sum((b.counters for b in self.bindings), self.retired)

    # ---- the way back ------------------------------------------------------------------------------------------------

    def teardown(self, force=False):
        """C  Leaves stock FSDP2 with shards of its own."""
        for b in self.bindings:
            if b.on_tide and not force and (reason := b.busy()):
                raise TideError(f"uninstall: {reason}: uninstall between steps", code_of("TIDE_ERR_STATE"))
        hooks.drop()
        for unit in self.units:
            for group in unit.groups:
                group._all_gather_result = None
                try:
                    group._to_sharded()
                except TideError:
                    pass  # the landings of a failed communicator cannot be released, and need not be
        for b in self.bindings:
            if b.on_tide:
                b.detach()
        for unit in self.units:
            for group in unit.groups:
                for p in group.fsdp_params:
                    p.__dict__.pop("_tide", None)
        self.bindings, self.landing, self.slot = [], {}, {}
        _settle([group for unit in self.units for group in unit.groups], any(comm.failed for comm in self.comms))
        self._destroy_comms()

    def _destroy_comms(self):
        for counted in self.counted:
            counted.drop()
        self.counted = []
        comms, self.comms = self.comms, []
        for comm in comms:
            comm.destroy()

    def report(self):
        rows = Report()
        groups = [group for unit in self.units for group in unit.groups]
        for b, group in zip(self.bindings, groups):
            if b.on_tide:
                path, not_node_major = b.group.path, self.not_node_major[group]
                shards = "adopted" if b.adopts else f"cast from {str(b.shard_dtype).removeprefix('torch.')}"
                rows.append(
                    GroupReport(
                        b.name,
                        "tide " + path.path.decode(),
                        path.reason.decode() + (f" ({not_node_major})" if not_node_major else ""),
                        path.all_gathers,
                        path.reduce_scatters,
                        self.landing[group],
                        shards,
                        path.digest,
                    )
                )
            else:
                rows.append(
                    GroupReport(
                        b.name, "stock", b.reason, b.counters.all_gathers, b.counters.reduce_scatters, "-", "-", 0
                    )
                )
        return rows


def _settle(groups, failed):
    """Torch's kernels may still read landings and shards. After a failure one of the library's streams may stand in NCCL
    for good, and with it whoever waits for the whole GPU: then only for the streams that FSDP2 computes and
    communicates on."""
    for device in {group.device for group in groups if group.device.type == "cuda"}:
        if not failed:
            torch.cuda.synchronize(device)
            continue
        streams = [torch.cuda.current_stream(device)]
        for group in groups:
            if group.device == device:
                streams += [stream for name, stream in vars(group.comm_ctx).items() if name.endswith("_stream")]
        for stream in dict.fromkeys(streams):
            stream.synchronize()


_OTHER_RANK = re.compile(r"^rank (\d+): ")


def _one_reason(ranks, reasons):
    """The same sentence on all ranks; with the ranks' numbers when they do not give the same one. What one rank's library
    has told all others comes from these with "rank <in the group>: " in front."""
    if len(set(reasons)) == 1:
        return reasons[0]
    if None not in reasons and len({_OTHER_RANK.sub("", reason) for reason in reasons}) == 1:
        where, reason = next((m[1], r[m.end() :]) for r in reasons if (m := _OTHER_RANK.match(r)))
        return f"rank {ranks[int(where)]}: {reason}"
    first = {}
    for rank, reason in zip(ranks, reasons):
        if reason is not None:
            first.setdefault(reason, rank)
    return "; ".join(f"rank {rank}: {reason}" for reason, rank in first.items())


def _signature(group):
    return [
        (p._module_info.param_name, tuple(p._orig_size), p.fsdp_placement.dim, str(p.sharded_param.dtype))
        for p in group.fsdp_params
    ]


def _digest(told):
    """What a thousand ranks can send each other of a large model."""
    return hashlib.sha256(repr(told).encode()).digest()


def _raise_difference(ranks, everyone):
    """everyone: [(name, signature) of each group] of each rank, not all alike."""
    ours = everyone[0]
    rank, theirs = next((rank, theirs) for rank, theirs in zip(ranks, everyone) if theirs != ours)
    if len(ours) != len(theirs):
        text = f"{len(theirs)} groups instead of {len(ours)}"
    else:
        a, b = next((a, b) for a, b in zip(ours, theirs) if a != b)
        text = f"{b[0]} {b[1]} instead of {a[0]} {a[1]}"
    raise TideError(
        f"install: rank {rank} has other parameter groups than rank {ranks[0]}: {text}", code_of("TIDE_ERR_MISMATCH")
    )


def _spec(group, name, ring):
    gather = support.DTYPES[support.gather_dtype(group, group.fsdp_params[0])]
    shard = support.DTYPES[group.fsdp_params[0].sharded_param.dtype]
    params = [
        tide_comm.ParamSpec(p._module_info.param_name, tuple(p._orig_size), p.fsdp_placement.dim)
        for p in group.fsdp_params
    ]
    return tide_comm.GroupSpec(
        name,
        params,
        dtype=gather,
        shard_dtype=shard,
        grad_dtype=gather,
        input=tide_comm.INPUT_ADOPTED if gather == shard else tide_comm.INPUT_ARGUMENT,
        landing=tide_comm.LANDING_RING if ring else tide_comm.LANDING_PRIVATE,
    )


def _landing_size(ranks):
    def size(group):
        return (
            sum(p._sharded_param_data.numel() for p in group.fsdp_params)
            * ranks
            * support.gather_dtype(group, group.fsdp_params[0]).itemsize
        )

    return size


def _local_size(ranks, node_size):
    """(ranks a node of one shard group when the job has node_size ranks a node, why that is 1 though they share nodes); 0:
    the machines decide."""
    if not node_size:
        return 0, None
    nodes = [rank // node_size for rank in ranks]
    for k, node in enumerate(nodes):
        if node in nodes[:k] and nodes[k - 1] != node:
            first = nodes.index(node)
            return 1, (
                f"ranks are not node-major: ranks {ranks[first]} and {ranks[k]} share node {node}, rank {ranks[k - 1]} "
                "between them does not"
            )
    counts = [nodes.count(node) for node in sorted(set(nodes))]
    if len(set(counts)) > 1:
        return 1, f"nodes hold different numbers of its ranks: {', '.join(map(str, counts))}"
    return counts[0], None


def _refused_group(error):
    """Index of the group that the library's sentence is about; None: it is about the communicator."""
    named = re.match(r"group (\d+) ", _OTHER_RANK.sub("", str(error)))
    return int(named[1]) if named else None
