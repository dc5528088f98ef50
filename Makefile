# TIDE: `make` builds the library and the CLI, `make test` and `make demo` are the README's two commands.
CC      ?= cc
AR      ?= ar
PREFIX  ?= /usr/local
BUILD   ?= build
VERSION := $(shell awk '/define TIDE_VERSION_(MAJOR|MINOR|PATCH)/ {v = v sep $$3; sep = "."} END {print v}' include/tide/tide.h)

WARN    := -Wall -Wextra -Wpedantic -Werror
# No contraction into FMA anywhere: the order and rounding of every addition is part of the contract (docs/design.md).
CFLAGS  ?= -O3 -g
ALLFLAGS = -std=c11 -D_GNU_SOURCE $(WARN) $(CFLAGS) $(SAN) -ffp-contract=off -fPIC -fvisibility=hidden -pthread -Iinclude -Isrc -MMD -MP
LDLIBS  := -pthread -lm

# CUDA kernels: one fatbin inside the library, made where nvcc is found. KERNELS=file lets several builds share one.
NVCC    ?= nvcc
NVCC_PATH := $(shell command -v $(NVCC) 2>/dev/null)
KERNELS ?= $(BUILD)/kernels.fatbin
KERNEL_SRC := $(sort $(wildcard src/fabric/cuda/kernels/*.cu src/fabric/cuda/kernels/*.cuh)) src/fabric/cuda/kernels/kernels.h include/tide/tide.h
NVCCFLAGS = -std=c++17 -O3 -fmad=false -lineinfo -Werror all-warnings -Iinclude -Isrc -gencode arch=compute_90a,code=sm_90a \
    -gencode arch=compute_90,code=compute_90 $(if $(findstring sm_100,$(shell $(NVCC) --list-gpu-code)),-gencode arch=compute_100a$(COMMA)code=sm_100a)
COMMA   := ,

LIB_SRC := $(sort $(filter-out src/cli/%,$(shell find src -name '*.c')))
CLI_SRC := $(sort $(wildcard src/cli/*.c))
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/%.o)
CLI_OBJ := $(CLI_SRC:%.c=$(BUILD)/%.o)
UNIT    := $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/unit/test_*.c))) $(BUILD)/tests/test_faults
# The source of the CUDA kernels on a CPU, where there is a C++20 compiler; its threads are not for the sanitizers.
CXX      ?= g++
EMULATED := $(if $(SAN),,$(shell printf '\043include <barrier>\n' | $(CXX) -std=c++20 -x c++ -E - >/dev/null 2>&1 && echo $(BUILD)/tests/test_kernels))
UNIT     += $(EMULATED)
# ONLY="engine comm": unit tests whose names contain one of the words; a point stands for the end of a name. EXCEPT: not those.
NAMED = $(foreach t,$(UNIT) $(FUZZ),$(if $(strip $(foreach w,$(1),$(findstring $(w),$(notdir $(t)).))),$(t)))
UNIT_RUN = $(filter-out $(if $(EXCEPT),$(call NAMED,$(EXCEPT))),$(if $(ONLY),$(call NAMED,$(ONLY)),$(UNIT) $(FUZZ)))
SUPPORT := $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/oracle/*.c tests/harness/*.c tests/fakes/*.c src/cli/rules*.c)))

# Fuzz targets. MAIN is what runs them: replay.o on the corpus, or libFuzzer (scripts/fuzz.sh).
FUZZ    := $(patsubst tests/fuzz/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/fuzz/fuzz_*.c)))
MAIN    ?= $(BUILD)/tests/fuzz/replay.o
SECONDS ?= 60

.PHONY: named $(UNIT:%=%.run) $(FUZZ:%=%.run) fuzz fuzzers all lib cli units objects unit test test-long venv demo deps benches bench plots clean install uninstall
export PYTHON
all: lib $(if $(CLI_SRC),cli)
lib: $(BUILD)/libtide.a $(BUILD)/libtide.so
cli: $(BUILD)/tide

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(ALLFLAGS) -c $< -o $@
# Unit tests are compiled more often than they are waited for.
TEST_OPT ?= -O1
$(BUILD)/tests/unit/%.o: ALLFLAGS += $(TEST_OPT)

ifneq ($(NVCC_PATH),)
$(KERNELS): $(KERNEL_SRC)
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -fatbin src/fabric/cuda/kernels/kernels.cu -o $@.tmp
	@mv $@.tmp $@
$(BUILD)/src/fabric/cuda/kernels/image.o: ALLFLAGS += -DTIDE_CUDA_IMAGE='"$(KERNELS)"'
$(BUILD)/src/fabric/cuda/kernels/image.o: $(KERNELS)
endif

$(BUILD)/libtide.a: $(LIB_OBJ)
	@rm -f $@
	$(AR) rcs $@ $^

$(BUILD)/libtide.so: $(LIB_OBJ)
	$(CC) $(CFLAGS) $(SAN) -shared -Wl,-soname,libtide.so.0 -o $@ $^ $(LDLIBS)
	@ln -sf libtide.so $(BUILD)/libtide.so.0

$(BUILD)/tide: $(CLI_OBJ) $(BUILD)/libtide.a
	$(CC) $(CFLAGS) $(SAN) -o $@ $^ $(LDLIBS)

# Unit tests see the internal headers and link the static library; tests/oracle shares no code with src/.
$(BUILD)/tests/%: $(BUILD)/tests/unit/%.o $(SUPPORT) $(BUILD)/libtide.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SAN) -o $@ $^ -lcmocka $(LDLIBS)
$(BUILD)/tests/test_kernels: tests/emulation/test_kernels.cpp tests/emulation/fabric/cuda/kernels/device.cuh $(KERNEL_SRC)
	@mkdir -p $(@D)
	$(CXX) -std=c++20 $(WARN) -Wno-unknown-pragmas -Wno-pedantic $(CFLAGS) -ffp-contract=off -Itests/emulation -Isrc -Iinclude -o $@ $< -pthread
# NCCL's own headers, where TIDE_NCCL_INCLUDE names their folder, and the CUDA toolkit's, which they include.
NCCL_HEADERS := $(if $(TIDE_NCCL_INCLUDE),-DTIDE_NCCL_HEADERS -isystem $(TIDE_NCCL_INCLUDE) \
    -isystem $(dir $(firstword $(wildcard $(dir $(NVCC_PATH))../include/cuda.h /usr/local/cuda/include/cuda.h))))
$(BUILD)/tests/unit/test_nccl_layout.o: ALLFLAGS += $(NCCL_HEADERS)
$(BUILD)/tests/unit/test_nccl_layout.o: $(BUILD)/nccl_headers.txt
$(BUILD)/nccl_headers.txt: named
	@mkdir -p $(@D)
	@echo '$(NCCL_HEADERS)' | cmp -s - $@ || echo '$(NCCL_HEADERS)' > $@
# Every fault in its place. The library's system calls pass through tests/fault/wrap.c, which can fail them.
WRAPPED := memfd_create fallocate mmap socket bind listen connect sendmsg accept4 recvmsg eventfd syscall pthread_create tide_plan_create
$(BUILD)/tests/test_faults: $(patsubst %.c,$(BUILD)/%.o,$(sort $(wildcard tests/fault/*.c))) $(SUPPORT) $(BUILD)/libtide.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SAN) $(WRAPPED:%=-Wl,--wrap=%) -o $@ $^ $(LDLIBS)
# The command line without its main: over the fake driver, and for the fuzz targets.
CLI_MAIN := $(BUILD)/tests/fakes/tide/cli_main.o
$(CLI_MAIN): src/cli/main.c
	@mkdir -p $(@D)
	$(CC) $(ALLFLAGS) -Dmain=tide_main -c $< -o $@
$(BUILD)/tide-fake: $(BUILD)/tests/fakes/tide/main.o $(CLI_MAIN) \
    $(filter-out %/cli/main.o $(BUILD)/src/cli/rules%,$(CLI_OBJ)) $(SUPPORT) $(BUILD)/libtide.a
	$(CC) $(CFLAGS) $(SAN) -o $@ $^ $(LDLIBS)
$(FUZZ): $(BUILD)/tests/fuzz_%: $(BUILD)/tests/fuzz/fuzz_%.o $(BUILD)/tests/fuzz/replay.o $(CLI_MAIN) \
    $(filter-out %/cli/main.o,$(CLI_OBJ)) $(BUILD)/libtide.a
	$(CC) $(CFLAGS) $(SAN) -o $@ $(filter-out %/replay.o,$^) $(MAIN) $(LDLIBS)
fuzzers: $(FUZZ)
$(FUZZ:%=%.run): $(BUILD)/tests/fuzz_%.run: $(BUILD)/tests/fuzz_%
	@if $< tests/fuzz/corpus/$* > $<.log 2>&1; then echo "== $<: $$(tail -n 1 $<.log)"; else echo "== $< FAILED"; cat $<.log; exit 1; fi
# Mutated inputs, where clang's libFuzzer is: SECONDS in all, shared among the targets.
fuzz:
	@SECONDS_IN_ALL=$(SECONDS) sh scripts/fuzz.sh
units: $(UNIT) $(FUZZ) $(BUILD)/tide-fake
# All that units consists of, not linked: for a compiler's warnings.
objects: $(LIB_OBJ) $(CLI_OBJ) $(SUPPORT) $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/unit/*.c tests/fault/*.c tests/fuzz/*.c tests/fakes/tide/*.c))
# Each test's output is printed whole when it has ended, so that -j runs several at once.
unit: $(UNIT_RUN:%=%.run)
$(UNIT:%=%.run): %.run: %
	@if $< > $<.log 2>&1; then echo "== $<"; cat $<.log; else echo "== $< FAILED"; cat $<.log; exit 1; fi

# Everything, with the compilers and sanitizers that are here: scripts/test.sh says what it skips. PYTHON=... picks the interpreter.
test:
	@sh scripts/test.sh
# The nightly amounts: more random plans, every named plan, every mutant, more orders, tens of thousands of calls.
test-long: units cli
	@BUILD=$(BUILD) sh scripts/test_long.sh $(ONLY)
# A Python with torch and the test packages; .venv when PYTHON has them not.
venv:
	@sh scripts/python.sh
# Stock FSDP2 and TIDE train the same small transformer, side by side. STEPS=n, TEXT=file-or-folder.
demo: lib
	@TIDE_BUILD=$(abspath $(BUILD)) PYTHONPATH=$(CURDIR)/python "$$(sh scripts/python.sh)" -m tide.demo $(if $(STEPS),--steps $(STEPS)) $(if $(TEXT),--text "$(TEXT)")
deps: lib $(if $(CLI_SRC),cli)
	@python3 scripts/check_deps.py $(BUILD)

# DESTDIR is where files are put now, PREFIX where they will be found.
ROOT := $(DESTDIR)$(PREFIX)
MACHINES := $(sort $(wildcard machines/*.txt))
install: all
	install -d "$(ROOT)/include/tide" "$(ROOT)/lib/pkgconfig" "$(ROOT)/bin"
	install -m 644 include/tide/tide.h "$(ROOT)/include/tide/tide.h"
	install -m 644 $(BUILD)/libtide.a "$(ROOT)/lib/libtide.a"
	install -m 755 $(BUILD)/libtide.so "$(ROOT)/lib/libtide.so.$(VERSION)"
	ln -sf libtide.so.$(VERSION) "$(ROOT)/lib/libtide.so.0"
	ln -sf libtide.so.0 "$(ROOT)/lib/libtide.so"
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' tide.pc.in > "$(ROOT)/lib/pkgconfig/tide.pc"
	install -m 755 $(BUILD)/tide "$(ROOT)/bin/tide"
	install -d "$(ROOT)/share/tide/machines"
	install -m 644 $(MACHINES) "$(ROOT)/share/tide/machines"
uninstall:
	rm -f $(MACHINES:%="$(ROOT)/share/tide/%")
	rm -f "$(ROOT)/include/tide/tide.h" "$(ROOT)/lib/libtide.a" "$(ROOT)/lib/libtide.so.$(VERSION)" "$(ROOT)/lib/libtide.so.0" \
	    "$(ROOT)/lib/libtide.so" "$(ROOT)/lib/pkgconfig/tide.pc" "$(ROOT)/bin/tide"
	-rmdir "$(ROOT)/include/tide" "$(ROOT)/share/tide/machines" "$(ROOT)/share/tide"

# Measurements; docs/bench-host.md keeps one run.
$(BUILD)/bench/libhost.so: bench/host.c $(BUILD)/libtide.a
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE $(WARN) $(CFLAGS) -fPIC -fvisibility=hidden -pthread -Iinclude -shared -o $@ $^ $(LDLIBS)
$(BUILD)/bench/libkernels.so: bench/kernels.c $(BUILD)/libtide.a
	@mkdir -p $(@D)
	$(CC) $(ALLFLAGS) -shared -o $@ $(filter %.c %.a,$^) $(LDLIBS)
$(BUILD)/bench/plan: bench/plan.c $(BUILD)/libtide.a
	@mkdir -p $(@D)
	$(CC) $(ALLFLAGS) -o $@ $(filter %.c %.a,$^) $(LDLIBS)
benches: $(BUILD)/bench/libhost.so $(BUILD)/bench/libkernels.so $(BUILD)/bench/plan
bench: benches
	@$(BUILD)/bench/plan
	@python=$$(sh scripts/python.sh) && TIDE_BUILD=$(BUILD) $$python bench/host.py

# The README's plots, from docs/gpu.md's tables and the simulation; needs matplotlib.
plots: cli
	@python=$$(sh scripts/python.sh) && TIDE_BUILD=$(BUILD) $$python bench/plots.py

.SECONDARY:
clean:
	rm -rf $(BUILD)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
