"""Every option has a visible effect or is an error that says why."""

import itertools

import pytest
from mori_gemm_ar.options import GATHER_DTYPES, GATHER_TRANSPORTS, MODES, QUANTS, resolve
from mori_shmem.errors import ArgumentError

# Each option with a value that is not its default, and the contexts in which it means something.
MEANINGFUL = {
    "gather_dtype": ("fp8", lambda mode, dtype, transport: mode != "gemm-only"),
    "gather_transport": ("sdma", lambda mode, dtype, transport: mode != "gemm-only"),
    "chunks": (2, lambda mode, dtype, transport: mode == "fused-sdma"),
    "sdma_queues": (
        2,
        lambda mode, dtype, transport: mode != "gemm-only" and (mode.endswith("sdma") or transport == "sdma"),
    ),
    "fuse_quantize": (True, lambda mode, dtype, transport: mode != "gemm-only" and dtype == "fp8"),
    "fuse_reduce_push": (
        True,
        lambda mode, dtype, transport: mode != "gemm-only" and transport == "sdma" and dtype == "bf16",
    ),
    "gather_bands": (8, lambda mode, dtype, transport: False),  # needs fuse_reduce_push
    "publish": ("fence", lambda mode, dtype, transport: False),
    "pull_blocks": (64, lambda mode, dtype, transport: mode != "gemm-only" and transport == "lsa"),
}


@pytest.mark.parametrize("name", MEANINGFUL)
def test_PK_2_every_option_is_honoured_or_refused_with_its_name_value_and_reason(name):
    value, means_something = MEANINGFUL[name]
    for mode, dtype, transport in itertools.product(MODES, GATHER_DTYPES, GATHER_TRANSPORTS):
        context = {"gather_dtype": dtype, "gather_transport": transport} if mode != "gemm-only" else {}
        given = {"mode": mode, **context, name: value}
        if means_something(mode, dtype, transport):
            assert getattr(resolve(**given), name) == value
        else:
            with pytest.raises(ArgumentError, match=rf"{name}={value!r} (has no effect|cannot be honoured)"):
                resolve(**given)


def test_PK_2_bands_and_publish_take_effect_with_the_fusion_they_belong_to():
    options = resolve(mode="split-sdma", fuse_reduce_push=True, gather_bands=8, publish="fence")
    assert (options.gather_bands, options.publish) == (8, "fence")
    options = resolve(
        mode="fused-lsa",
        gather_transport="sdma",
        gather_dtype="fp8",
        fuse_quantize=True,
        fuse_reduce_push=True,
    )
    assert (options.gather_bands, options.publish) == (4, "writethrough")
    with pytest.raises(ArgumentError, match=r"add fuse_quantize=True"):
        resolve(gather_transport="sdma", gather_dtype="fp8", fuse_reduce_push=True)


def test_PK_2_all_reasons_are_given_at_once():
    with pytest.raises(ArgumentError, match=r"chunks=4 has no effect.*pull_blocks=8 has no effect"):
        resolve(mode="split-sdma", chunks=4, pull_blocks=8)


@pytest.mark.parametrize("name", ["mode", "quant", "gather_dtype", "gather_transport", "publish"])
def test_unknown_words_never_fall_through_to_a_default(name):
    with pytest.raises(ArgumentError, match=rf"{name}='bogus': allowed are "):
        resolve(**{name: "bogus"})
    if name in ("mode", "quant"):
        with pytest.raises(ArgumentError, match=rf"{name}=None"):
            resolve(**{name: None})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("chunks", 0),
        ("chunks", 65),
        ("sdma_queues", 9),
        ("gather_bands", 2.5),
        ("pull_blocks", True),
        ("pull_blocks", -1),
    ],
)
def test_numbers_out_of_range_name_the_range(name, wrong):
    with pytest.raises(ArgumentError, match=rf"{name}={wrong!r}: a whole number from 1 to "):
        resolve(**{name: wrong})


def test_flags_are_flags():
    for name in ("fuse_quantize", "fuse_reduce_push"):
        assert getattr(resolve(**{name: False}), name) is False
        with pytest.raises(ArgumentError, match=rf"{name}=1: allowed are True, False"):
            resolve(**{name: 1})


def test_defaults_of_the_wires():
    assert [resolve(mode=mode).gather_transport for mode in MODES] == [None, "sdma", "sdma", "lsa", "lsa"]
    assert all(resolve(mode=mode, gather_dtype="fp8").gather_transport == "lsa" for mode in MODES[1:])
    assert [resolve(mode=mode).uses_queues for mode in MODES] == [False, True, True, False, False]
    assert all(resolve(quant=quant).quant == quant for quant in QUANTS)
