"""Datasheet numbers, and rooflines that a person can redo."""

import csv

import pytest

from kvlab import _data, geometry, hardware


def test_links_follow_from_their_lanes() -> None:
    for name, lanes, transfers in (("PCIe 3.0 x16", 16, 8e9), ("PCIe 4.0 x16", 16, 16e9), ("PCIe 5.0 x16", 16, 32e9)):
        assert hardware.find(name).bandwidth == int(lanes * transfers * 128 / 130 / 8)
    assert hardware.transfer_time(10**10, "PCIe 4.0 x16") == pytest.approx(0.317, abs=5e-4)  # 10 GB: 317 ms
    assert hardware.transfer_time(0, "PCIe 4.0 x16") == 0
    assert hardware.transfer_time(3_500_000_000, hardware.find("NVMe SSD gen3")) == 1


def test_every_row_has_a_source_and_a_known_link() -> None:
    for name in hardware.names():
        row = hardware.find(name)
        assert row.source.startswith("https://")
        assert (row.flops is not None) == (row.kind in ("gpu", "cpu"))
        assert row.link is None or hardware.find(row.link).kind == "link"
    with _data.path("hardware.csv").open(encoding="utf-8", newline="") as file:
        assert {len(row) for row in csv.reader(file)} == {8}


def test_capacity() -> None:
    assert hardware.find("h100").capacity(4) == 320_000_000_000
    with pytest.raises(ValueError, match=r"PCIe 4.0 x16 is a link: it holds nothing; choose of: H100"):
        hardware.find("PCIe 4.0 x16").capacity()
    with pytest.raises(ValueError, match="devices=0"):
        hardware.find("h100").capacity(0)
    model = geometry.find("Llama-3.1-70B")
    one, four = (geometry.max_tokens(model, hardware.find("h100"), devices=devices) for devices in (1, 4))
    assert one == 0  # 141 GB of weights
    assert four is not None
    assert four > 131_072


def test_one_decode_step_waits_for_memory() -> None:
    model, device = geometry.find("Llama-3.1-8B"), hardware.find("h100")
    step = hardware.decode_time(model, device, 8192)
    table = 128_256 * 4096  # the embedding is a lookup
    assert step.bytes == 2 * (8_030_261_248 - table) + 8192 * 131_072
    assert step.flops == 2 * (8_030_261_248 - table) + 32 * 4 * 32 * 128 * 8192
    assert step.seconds == step.bytes / 3.35e12
    assert (step.bound, step.label) == ("memory", "predicted")
    assert str(step) == "predicted: at least 4.80 ms a step, bound by memory"
    halved = hardware.decode_time(model, device, 8192, devices=2)
    assert halved.seconds == pytest.approx(step.seconds / 2)
    assert hardware.decode_time(model, device, 8192, bits=4, group_size=64).bytes < step.bytes


def test_many_short_sequences_wait_for_compute() -> None:
    step = hardware.decode_time(geometry.find("Llama-3.1-8B"), hardware.find("h100"), 1, requests=1024)
    assert step.bound == "compute"
    assert step.seconds == step.flops / 989.5e12


def test_a_mixture_reads_the_experts_it_meets() -> None:
    model = geometry.find("Mixtral-8x7B")
    always = 46_702_792_704 - 45_097_156_608 - 32_000 * 4096
    assert hardware.weights_read(model, 1) == always + 45_097_156_608 // 4
    assert hardware.weights_read(model, 2) == always + round(45_097_156_608 * (1 - 0.75**2))
    assert hardware.weights_read(model, 1000) == pytest.approx(always + 45_097_156_608)


def test_latent_and_state() -> None:
    deepseek = geometry.find("DeepSeek-V3")  # absorbed: every head reads 512 + 64 numbers as key, 512 as value
    assert hardware.attention_flops(deepseek, 1000) == 61 * 2 * 128 * 1000 * (576 + 512)
    assert hardware.attention_flops(deepseek, 1000, kept_tokens=10) == 61 * 2 * 128 * 10 * (576 + 512)
    mamba = geometry.find("Mamba-2.8B")
    assert hardware.decode_time(mamba, hardware.find("T4"), 10) == hardware.decode_time(mamba, hardware.find("T4"), 10**6)
    assert hardware.decode_time(mamba, hardware.find("T4"), 1).bytes == 2 * 2_768_345_600 + 2 * 13_107_200


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"no hardware 'H900'; known: H100 SXM 80GB, H200"):
        hardware.find("H900")
    with pytest.raises(ValueError, match=r"could be any of: PCIe 4.0 x4, PCIe 4.0 x16"):
        hardware.find("pcie 4")
    with pytest.raises(ValueError, match="is a disk: it does not compute"):
        hardware.decode_time(geometry.find("GPT-2"), hardware.find("NVMe SSD gen4"), 1)
    with pytest.raises(ValueError, match="count=-1"):
        hardware.transfer_time(-1, "PCIe 4.0 x16")
    with pytest.raises(ValueError, match="kind='tpu'; allowed: gpu, cpu, link, disk"):
        hardware.Hardware("x", "tpu", 1, 1)
    with pytest.raises(ValueError, match="bandwidth=0"):
        hardware.Hardware("x", "gpu", 1, 0)


def test_data_is_found_beside_the_package_or_where_it_was_installed(tmp_path, monkeypatch) -> None:
    assert _data.path("models.json").parent.name == "data"
    installed = tmp_path / "share" / "kvlab" / "data"
    installed.mkdir(parents=True)
    (installed / "models.json").write_text("{}")
    monkeypatch.setattr(_data, "_PACKAGE", tmp_path / "lib" / "kvlab")
    monkeypatch.setattr(_data.sys, "prefix", str(tmp_path))
    assert _data.path("models.json") == installed / "models.json"
    with pytest.raises(FileNotFoundError, match=r"'nothing.csv' not found; looked in .*share"):
        _data.path("nothing.csv")
