"""tide info: version, fabrics, knobs, models."""

import math
import re

from command import ROOT


def test_info(tide):
    header = (ROOT / "include/tide/tide.h").read_text()
    version = ".".join(
        re.search(rf"TIDE_VERSION_{part} (\d+)", header).group(1) for part in ("MAJOR", "MINOR", "PATCH")
    )
    result = tide("info")
    assert result.code == 0 and result.out.splitlines()[0] == f"tide {version}"
    info = tide("info", "--json").json
    assert info["schema"] == 1 and info["version"] == version
    (host,) = [f for f in info["fabrics"] if f["name"] == "host"]
    assert host["usable"] and "shared memory" in host["why"]


def test_knobs_are_those_of_the_header(tide):
    header = (ROOT / "include/tide/tide.h").read_text()
    table = header[header.index("#define TIDE_KNOBS") : header.index("typedef struct tide_options")]
    names = re.findall(r"X\((\w+), ", table.replace("X(name,", ""))
    assert [k["name"] for k in tide("info", "--json").json["knobs"]] == names


def test_models_have_their_public_sizes(tide):
    models = {m["name"]: m for m in tide("info", "--models", "--json").json["models"]}
    # Parameters of the whole model less its embeddings and final norm, divided by its layers.
    assert models["llama-3.1-70b"]["elements"] == (70_553_706_496 - 2 * 128_256 * 8192 - 8192) // 80
    assert models["qwen3-30b-a3b"]["elements"] == (30_532_122_624 - 2 * 151_936 * 2048 - 2048) // 48
    assert (
        models["wan2.2-t2v-a14b"]["elements"]
        == 8 * (5120 * 5120 + 5120) + 4 * 5120 + 2 * 5120 + 6 * 5120 + 2 * 5120 * 13824 + 13824 + 5120
    )
    for m in models.values():
        assert m["elements"] == sum(math.prod(p["dims"]) for p in m["params"])
    text = tide("info", "--models").out
    assert all(name in text for name in models)
