"""In which order groups are gathered, and which of them may share landings.

TIDE's ring gives the k-th ring group slot k mod ring_slots. Whether that is safe depends on how many groups are held at
once and in which order they come and go, so one training step is played through here, with FSDP2's own prefetch rules,
before a single landing is allocated. At run time the library checks the same thing for every call.
"""

from dataclasses import dataclass, field

from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from tide.fsdp2.support import groups_of


@dataclass(eq=False)
class Unit:
    """One FSDPState: what is gathered together around a module's forward."""

    state: object
    names: list
    root: bool = False
    children: list = field(default_factory=list)

    @property
    def groups(self):
        return groups_of(self.state)

    def reshards(self, group):
        """reshard_after_forward as it will be after the first forward, when the root turns its own off."""
        return group.post_forward_mesh_info is not None and not (self.root and self.state._auto_reshard_after_forward)

    def why_kept(self, group):
        """Why the group outlives its forward or its backward; None when it does not."""
        if not self.reshards(group):
            return "the root stays unsharded" if self.root else "reshard_after_forward=False"
        return None if group.reshard_after_backward else "reshard_after_backward=False"


def find_units(model):
    """(all units in the order of registration, which is taken for the order of execution; the outermost ones)."""
    units, roots, by_state, stack = [], [], {}, []
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        while stack and not (name.startswith(stack[-1][0] + ".") or stack[-1][0] == ""):
            stack.pop()
        if state is None:
            continue
        if state in by_state:  # fully_shard([a, b])
            by_state[state].names.append(name)
            continue
        unit = by_state[state] = Unit(state, [name])
        units.append(unit)
        unit.root = state._is_root if state._is_root is not None else not stack
        (stack[-1][1].children if stack else roots).append(unit)
        if len(state._modules) == 1:
            stack.append((name, unit))
    return units, roots


def play_step(roots, by_group):
    """("gather" | "release", group) of one forward and backward, as FSDP2 will issue them."""
    events, held, order = [], set(), []

    def gather(group):
        if group not in held:
            held.add(group)
            events.append(("gather", group))

    def release(group):
        if group in held:
            held.discard(group)
            events.append(("release", group))

    def forward(unit):
        for group in unit.groups:
            gather(group)
        for state in unit.state._states_to_forward_prefetch:
            for group in groups_of(state):
                gather(group)
        for child in unit.children:
            forward(child)
        for group in unit.groups:
            if unit.reshards(group):
                release(group)
            order.append(group)

    def prefetch(group):
        here = order.index(group)
        n_groups = len(by_group[group].groups)
        if n_groups == 1:
            if here > 0:
                gather(order[here - 1])
        elif by_group[group].groups.index(group) == 1:  # FSDPParamGroup._backward_prefetch: only index 1 prefetches
            target = None
            for other in reversed(order[:here]):
                if by_group[other] is by_group[group]:
                    continue
                if target is not None and by_group[other] is not target:
                    break
                target = by_group[other]
                gather(other)

    def backward(unit):
        explicit = unit.state._states_to_backward_prefetch
        for group in unit.groups:
            gather(group)
            if not explicit:
                prefetch(group)
        for state in explicit:
            for group in reversed(groups_of(state)):
                gather(group)
        for child in reversed(unit.children):
            backward(child)
        for group in unit.groups:
            release(group)

    for root in roots:
        forward(root)
    for root in reversed(roots):
        backward(root)
    return events


def safe(events, ring, slots):
    """Whether no group is gathered into a slot that another one holds, over two steps."""
    slot = {group: k % slots for k, group in enumerate(ring)}
    owner = {}
    for what, group in events + events:
        if group not in slot:
            continue
        if what == "release":
            owner.pop(slot[group], None)
        elif owner.setdefault(slot[group], group) is not group:
            return False
    return True


def lasting(events, slot):
    """The groups whose landing nobody needs between their last release in the forward and their first gather in the
    backward: what was gathered for the one serves the other. slot: {group: landing}, equal ones are shared."""
    result = set()
    for group in slot:
        mine = [k for k, (_, other) in enumerate(events) if other is group]
        if [events[k][0] for k in mine] != ["gather", "release", "gather", "release"]:
            continue
        between = events[mine[1] + 1 : mine[2]]
        if not any(what == "gather" and slot.get(other) == slot[group] for what, other in between):
            result.add(group)
    return result


def landing_bytes(groups, ring, slots, size_of):
    """Landings of a rank: each slot as large as the largest group assigned to it, and the private ones."""
    slot_bytes = [0] * slots
    for k, group in enumerate(ring):
        slot_bytes[k % slots] = max(slot_bytes[k % slots], size_of(group))
    return sum(slot_bytes) + sum(size_of(group) for group in groups if group not in ring)


def units_by_group(units):
    return {group: unit for unit in units for group in unit.groups}


def choose_ring(units, roots, groups, size_of, kept, ring_slots=None, private=()):
    """(ring groups, ring slots, {group: why it is private}) for the groups of one communicator, in their order.

    kept: {group: why} of those that have been seen to outlive a forward or a backward.
    ring_slots: the user's choice, taken as it is. Else the cheapest safe one of: all candidates, or only the innermost
    modules (a module that is held while others inside it come and go may cost the ring more slots than a landing of its
    own).
    """
    by_group = units_by_group(units)
    why = {}
    for group in groups:
        unit = by_group[group]
        if any(name in private for name in unit.names):
            why[group] = "asked for"
        elif group in kept:
            why[group] = kept[group]
        elif len(unit.state._modules) > 1:
            why[group] = "fully_shard over several modules"
    candidates = [group for group in groups if group not in why]
    if ring_slots is not None:
        return candidates, ring_slots, why
    events = play_step(roots, by_group)
    choices = []
    for ring in (candidates, [group for group in candidates if not by_group[group].children]):
        for slots in range(2, max(3, len(ring) + 1)):
            if safe(events, ring, slots):
                choices.append((landing_bytes(groups, ring, slots, size_of), len(choices), ring, slots))
                break
    _, _, ring, slots = min(choices, key=lambda choice: choice[:2])
    for group in candidates:
        if group not in ring:
            why[group] = "it is held while the modules inside it come and go"
    return ring, slots, why
