"""Shapes files: what is read, and errors that name file and line."""

import pytest


def plan(tide, path, *words):
    return tide("plan", "--shapes", path, "--json", *words)


def test_reads_every_form(tide, tmp_path):
    path = tmp_path / "block.txt"
    path.write_text(
        "# a block\n\nw1 float32 10 3   # uneven\n\tscalar fp32\nstrips fp32 2 8 3 shard=1\nnothing fp32 0 7\n"
    )
    result = plan(tide, path, "--local", 4)
    assert result.code == 0, result.err
    (group,) = result.json["groups"]
    assert group["dtype"] == "fp32" and group["item_size"] == 4
    assert [(p["name"], p["strips"], p["shard"], p["elements"]) for p in group["params"]] == [
        ("w1", 1, 9, 30),
        ("scalar", 1, 1, 1),
        ("strips", 2, 12, 48),
        ("nothing", 1, 0, 0),
    ]
    assert [p["packed_offset"] for p in group["params"]] == [0, 9, 10, 22]
    assert (
        tide("plan", "--shapes", "-", "--json", "--local", 4, stdin=path.read_text()).json["groups"][0]["params"]
        == group["params"]
    )


def test_opaque_items(tide, tmp_path):
    path = tmp_path / "s"
    path.write_text("a opaque3 7\n")
    (group,) = plan(tide, path).json["groups"]
    assert (group["dtype"], group["item_size"], group["grad_dtype"]) == ("opaque", 3, "none")


BAD = [
    ("a\n", "{file}:1: 'a': no dtype; expected name dtype d0 d1 ... [shard=d]"),
    ("# x\na bf17 3\n", "{file}:2: dtype: 'bf17' is not one of fp32, bf16, fp16, opaqueN"),
    ("a opaque0 3\n", "{file}:1: dtype: 'opaque0' is not one of fp32, bf16, fp16, opaqueN"),
    ("a bf16 3\nb fp32 3\n", "{file}:2: dtype: 'fp32' differs from that of the lines before; a group has one"),
    ("a bf16 3 -1\n", "{file}:1: d1: '-1' is not a size in 0..9223372036854775807"),
    ("a bf16 3 x\n", "{file}:1: d1: 'x' is not a size in 0..9223372036854775807"),
    ("a bf16 9223372036854775808\n", "{file}:1: d0: '9223372036854775808' is not a size in 0..9223372036854775807"),
    ("a bf16 3 4 shard=2\n", "{file}:1: shard: '2' is not a dimension in 0..1"),
    ("a bf16 3 4 shard=\n", "{file}:1: shard: '' is not a dimension in 0..1"),
    ("a bf16 3 shard=0 4\n", "{file}:1: '4': nothing may follow shard="),
    ("a bf16 1 1 1 1 1 1 1 1 1\n", "{file}:1: more than 8 dimensions"),
    ("\n# nothing\n", "--shapes: {file}: no parameters"),
    ("a bf16 3\0 4\n", "{file}:1: a zero byte; expected text"),
    ("a bf16 2 6 shard=1\n", "group 0 param 0 dims[1]: 6 is not a multiple of the 4 ranks, as shard_dim 1 > 0 needs"),
    ("".join(f"p{i} bf16 1\n" for i in range(4097)), "{file}:4097: more than 4096 parameters"),
]


@pytest.mark.parametrize("text, line", BAD, ids=range(len(BAD)))
def test_bad_files(tide, tmp_path, text, line):
    path = tmp_path / "shapes.txt"
    path.write_text(text)
    result = plan(tide, path)
    assert (result.code, result.out, result.err) == (2, "", "tide plan: " + line.format(file=path) + "\n")


def test_missing_file(tide, tmp_path):
    result = plan(tide, tmp_path / "none")
    assert (result.code, result.err) == (2, f"tide plan: --shapes: {tmp_path}/none: No such file or directory\n")


def test_a_folder_is_no_file(tide, tmp_path):
    result = plan(tide, tmp_path)
    assert (result.code, result.err) == (2, f"tide plan: --shapes: {tmp_path}: Is a directory\n")
