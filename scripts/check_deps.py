#!/usr/bin/env python3
"""Checks that dependencies between the rooms point down CONTRIBUTING.md's list only.

Three looks: at #include lines; at the symbols that each object file needs (nm), which sees what an include does not;
and at Python's imports of torch. usage: check_deps.py [BUILD-FOLDER]
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A room may use itself and what stands here.
BASE = {"base"}
GEOMETRY = BASE | {"geometry"}
PLAN = GEOMETRY | {"plan"}
ENGINE = PLAN | {"fabric", "schedule", "engine"}
ALLOWED = {
    "base": BASE,
    "geometry": GEOMETRY,
    "plan": PLAN,
    "schedule": PLAN | {"schedule"},
    "fabric": PLAN | {"fabric"},
    "engine": ENGINE,
    "comm": ENGINE | {"comm"},
    "cli": ENGINE | {"comm", "cli"},
}
# What checks others may not share their code: rooms whose symbols these files must not need.
INDEPENDENT = {
    "src/schedule/verify.c": {"plan", "geometry"},
    "src/schedule/verify_access.c": {"plan", "geometry"},
    "src/schedule/verify_memory.c": {"plan", "geometry"},
    "src/schedule/verify_report.c": {"plan", "geometry"},
    "src/cli/oracle.c": set(ALLOWED) - {"cli"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


def room_of(path):
    """Room of a path like src/plan/ag.c or plan/plan.h; None outside of src."""
    parts = pathlib.PurePath(path).parts
    parts = parts[1:] if parts and parts[0] == "src" else parts
    return parts[0] if len(parts) > 1 and parts[0] in ALLOWED else None


def check_includes(errors):
    count = 0
    for path in sorted(ROOT.glob("src/**/*.[ch]")):
        name = path.relative_to(ROOT).as_posix()
        room = room_of(name)
        if room is None:
            errors.append(f"{name}: not in a room of CONTRIBUTING.md's list")
            continue
        for include in INCLUDE.findall(path.read_text()):
            count += 1
            target = room_of(include) or (room if (path.parent / include).exists() else None)
            if include.startswith("tide/"):
                continue
            if target is None:
                errors.append(f'{name}: includes "{include}", which is in no room')
            elif target not in ALLOWED[room]:
                errors.append(f'{name}: includes "{include}": {room} may not depend on {target}')
    for path in sorted(ROOT.glob("tests/oracle/*.[ch]")):
        for include in INCLUDE.findall(path.read_text()):
            count += 1
            if room_of(include):
                errors.append(
                    f'{path.relative_to(ROOT).as_posix()}: includes "{include}": an oracle shares no code with src'
                )
    return count


def symbols(build):
    """Defined and needed symbols of every object file below build/src, by source name."""
    defined, needed = {}, {}
    for obj in sorted((build / "src").glob("**/*.o")):
        source = "src/" + obj.relative_to(build / "src").with_suffix(".c").as_posix()
        if not (ROOT / source).exists():
            continue
        needed[source] = set()
        for line in subprocess.run(
            ["nm", "-P", str(obj)], check=True, capture_output=True, text=True
        ).stdout.splitlines():
            symbol, kind = line.split()[:2]
            if kind in "Uw":
                needed[source].add(symbol)
            elif kind.isupper():
                defined[symbol] = source
    return defined, needed


def check_symbols(build, errors):
    defined, needed = symbols(build)
    count = 0
    for source, wanted in needed.items():
        room = room_of(source)
        for symbol in sorted(wanted & set(defined)):
            target = defined[symbol]
            count += 1
            if room_of(target) not in ALLOWED[room]:
                errors.append(f"{source}: needs {symbol} of {target}: {room} may not depend on {room_of(target)}")
            if room_of(target) in INDEPENDENT.get(source, ()):
                errors.append(f"{source}: needs {symbol} of {target}: it must not share that room's code")
    if not needed:
        errors.append(f"{build}: no object files; run make first")
    return count


def check_python(errors):
    """The library's face imports no torch: that is for the adapter, and for the demo, a program on top of it."""
    count = 0
    for path in sorted(ROOT.glob("python/tide/**/*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        count += 1
        if name.startswith(("python/tide/fsdp2/", "python/tide/demo/")):
            continue
        if re.search(r"^\s*(import|from)\s+torch\b", text, re.M):
            errors.append(f"{name}: imports torch; only the adapter and the demo may")
        if re.search(r"^(import|from)\s+(tide)?\.?(fsdp2|demo)\b", text, re.M):
            errors.append(f"{name}: imports the adapter or the demo, which build on it")
    return count


def main():
    build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build")
    errors = []
    includes, needs, modules = check_includes(errors), check_symbols(build, errors), check_python(errors)
    for error in errors:
        print(error)
    print(f"deps: {includes} includes, {needs} symbols, {modules} Python files, {len(errors)} wrong")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
