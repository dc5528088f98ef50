"""docs/support.md on GPUs: the rows that two GPUs allow, by the same functions as on the CPU, each equal to stock FSDP2
with NCCL there. Left out: HSDP and tensor parallelism (four ranks), the forked data loader (CUDA and fork)."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import test_rows as rows
import training as t

BF16, FP16 = torch.bfloat16, torch.float16
HALF = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=torch.float32)
ROWS = {
    "one_linear": [(rows.one_linear, t.PURE), (rows.one_linear, t.MIXED)],
    "mixed_precision": [(rows.precision, t.MIXED, "cast from float32")],
    "pure_fp32": [(rows.precision, t.PURE, "adopted")],
    "pure_bf16": [(rows.pure_bf16, t.PURE, BF16, "adopted")],
    "bf16_reduction": [
        (rows.pure_bf16, MixedPrecisionPolicy(param_dtype=BF16), torch.float32, "cast from float32"),
    ],
    "fp16_parameters": [(rows.precision, HALF, "cast from float32")],
    "uneven_rows": [(rows.few_rows, t.PURE), (rows.few_rows, t.MIXED)],
    "many_parameters": [(rows.many, t.MIXED)],
    "shard_1": [(rows.shard_1, t.PURE), (rows.shard_1, t.MIXED)],
    "nested": [(rows.nested, t.MIXED)],
    "several_modules": [(rows.over_several_modules, t.MIXED)],
    "reshard": [(rows.reshard, t.MIXED), (rows.no_reshard, t.MIXED)],
    "changed_reshard": [(rows.changed_reshard,)],
    "prefetch": [(rows.prefetch, t.MIXED)],
    "unshard_async": [(rows.unshard_async, t.MIXED)],
    "accumulate": [
        (rows.accumulate, t.MIXED, True, True),
        (rows.accumulate, t.PURE, False, True),
        (rows.accumulate, t.MIXED, False, False),
    ],
    "checkpointing": [(rows.checkpointing, t.MIXED)],
    "evaluate": [(rows.evaluate, t.MIXED)],
    "frozen": [(rows.frozen, t.MIXED)],
    "shared": [(rows.shared, t.MIXED)],
    "unused": [(rows.unused, t.MIXED, False), (rows.unused, t.MIXED, True)],
    "divide": [(rows.divide, t.MIXED)],
    "clip": [(rows.clip, t.MIXED)],
    "assign": [(rows.assign, t.MIXED), (rows.assign, t.PURE)],
    "ema": [(rows.ema, t.MIXED), (rows.ema, t.PURE)],
    "compiled": [(rows.compiled, t.MIXED, "eager"), (rows.compiled, t.MIXED, "aot_eager")],
    "two_models": [(rows.two_models, t.MIXED)],
    "slot_reuse": [(rows.slot_reuse, t.MIXED), (rows.slot_reuse, t.PURE)],
}


@pytest.mark.parametrize("row", ROWS)
def test_row(pool, node_size, row):
    for function, *arguments in ROWS[row]:
        pool.run(function, node_size, *arguments)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
def test_exception_in_forward(pool, node_size):
    pool.run(rows.interrupted, node_size, t.MIXED)


def test_optimizer_and_distributed_checkpoint(pool, node_size, tmp_path):
    pool.run(rows.save_and_load, node_size, t.MIXED, str(tmp_path / "mixed"))
    pool.run(rows.save_and_load, node_size, t.PURE, str(tmp_path / "pure"))


def test_async_checkpoint(pool, node_size, tmp_path):
    pool.run(rows.async_save, node_size, str(tmp_path / "async"))
