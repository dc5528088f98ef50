#!/bin/sh
# install_test.sh - installs into a temporary prefix and builds and runs the examples against it: gather.c shared and static,
# mpi.c where there is MPI.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
cc=${CC:-cc}
make=${MAKE:-make}

fail() { echo "install: $*" >&2; exit 1; }

$make -s -C "$root" install PREFIX="$prefix"
for f in include/tide/tide.h lib/libtide.a lib/libtide.so lib/libtide.so.0 lib/pkgconfig/tide.pc bin/tide \
    share/tide/machines/paper.txt share/tide/machines/h200-x2.txt; do
    [ -e "$prefix/$f" ] || fail "$f is missing"
done
[ "$(find "$prefix" -type f | wc -l)" -eq 7 ] || fail "unexpected files: $(find "$prefix" -type f | tr '\n' ' ')"

(cd "$work" && "$prefix/bin/tide" plan --machine h200-x2 > out) || fail "the installed tide does not find machine h200-x2"

$make -s -C "$root" install PREFIX="$work/a b"
[ -x "$work/a b/bin/tide" ] || fail "a prefix with a space: bin/tide is missing"
$make -s -C "$root" uninstall PREFIX="$work/a b"
[ -z "$(find "$work/a b" -type f)" ] || fail "uninstall left $(find "$work/a b" -type f | tr '\n' ' ')"

if command -v pkg-config > /dev/null; then
    export PKG_CONFIG_PATH="$prefix/lib/pkgconfig"
    version=$(pkg-config --modversion tide)
    cflags=$(pkg-config --cflags tide)
    libs=$(pkg-config --libs tide)
    all_libs=$(pkg-config --static --libs tide)
else # read the file as pkg-config would
    pc() { sed -n "s|^$1: *||p" "$prefix/lib/pkgconfig/tide.pc" | sed -e "s|\${libdir}|$prefix/lib|" -e "s|\${includedir}|$prefix/include|"; }
    grep -qx "prefix=$prefix" "$prefix/lib/pkgconfig/tide.pc" || fail "tide.pc names another prefix"
    version=$(pc Version)
    cflags=$(pc Cflags)
    libs=$(pc Libs)
    all_libs="$libs $(pc Libs.private)"
fi
declared=$(awk '/define TIDE_VERSION_(MAJOR|MINOR|PATCH)/ {v = v sep $3; sep = "."} END {print v}' "$root/include/tide/tide.h")
[ "$version" = "$declared" ] || fail "tide.pc says version $version, the header $declared"

# shellcheck disable=SC2086 # flags are meant to be split
$cc -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror "$root/examples/gather.c" $cflags $libs -o "$work/gather_shared"
# shellcheck disable=SC2086
$cc -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror "$root/examples/gather.c" $cflags -Wl,-Bstatic $all_libs -Wl,-Bdynamic -o "$work/gather_static"
LD_LIBRARY_PATH=$prefix/lib "$work/gather_shared" > "$work/out" || fail "the shared example failed: $(cat "$work/out")"
[ "$(tail -n 1 "$work/out")" = "gather: ok" ] || fail "the shared example said: $(cat "$work/out")"
"$work/gather_static" > "$work/out" || fail "the static example failed: $(cat "$work/out")"
[ "$(tail -n 1 "$work/out")" = "gather: ok" ] || fail "the static example said: $(cat "$work/out")"

if command -v mpicc > /dev/null && command -v mpirun > /dev/null; then
    # shellcheck disable=SC2086
    OMPI_CC=$cc MPICH_CC=$cc mpicc -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror "$root/examples/mpi.c" $cflags $libs -o "$work/mpi"
    # Open MPI's leave to run as root, and with more ranks than cores.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    for node_size in 0 2; do
        LD_LIBRARY_PATH=$prefix/lib mpirun -n 4 "$work/mpi" $node_size > "$work/out" 2>&1 || fail "the MPI example failed: $(cat "$work/out")"
        [ "$(tail -n 1 "$work/out")" = "mpi: ok" ] || fail "the MPI example said: $(cat "$work/out")"
        echo "mpi: $(head -n 1 "$work/out")"
    done
else
    echo "examples/mpi.c not run: no mpicc"
fi

# The shared library exports what the header declares, and nothing else.
nm -D --defined-only "$prefix/lib/libtide.so" | awk '$2 == "T" {print $3}' | sort > "$work/exported"
grep -o 'tide_[a-z_0-9]*(' "$prefix/include/tide/tide.h" | tr -d '(' | sort -u > "$work/declared"
extra=$(comm -23 "$work/exported" "$work/declared")
[ -z "$extra" ] || fail "exported but not declared: $extra"
missing=$(grep -A4 '^TIDE_API' "$prefix/include/tide/tide.h" | grep -o 'tide_[a-z_0-9]*(' | tr -d '(' | sort -u | comm -13 "$work/exported" -)
[ -z "$missing" ] || fail "declared but not exported: $missing"

printf '#include <tide/tide.h>\nint main() { tide_options o = TIDE_OPTIONS_INIT; return tide_options_set(&o, "k", 2); }\n' > "$work/a.cc"
if command -v c++ > /dev/null; then
    # shellcheck disable=SC2086
    c++ -Wall -Wextra -Werror "$work/a.cc" $cflags $libs -o "$work/cxx"
    LD_LIBRARY_PATH=$prefix/lib "$work/cxx"
fi

# DESTDIR: staged here, to be found there.
$make -s -C "$root" install DESTDIR="$work/stage" PREFIX=/opt/tide
grep -qx 'prefix=/opt/tide' "$work/stage/opt/tide/lib/pkgconfig/tide.pc" || fail "DESTDIR leaked into tide.pc"
$make -s -C "$root" uninstall PREFIX="$prefix"
[ -z "$(find "$prefix" -type f)" ] || fail "uninstall left $(find "$prefix" -type f)"
echo "install: ok"
