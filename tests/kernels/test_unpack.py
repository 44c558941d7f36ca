"""The unpacking instructions, which the interpreter cannot run, run here: the PTX that the kernel holds, line by line, in numpy."""

from itertools import pairwise

import numpy as np
import pytest

from kvlab_kernels import _reading_kernels as kernels


def run(asm, word):
    """The one output register of a body of PTX, for one 32-bit input."""
    registers = {"$1": np.uint32(word)}

    def value(name):
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def halves(x):
        return np.array([x], np.uint32).view(np.float16)

    for line in asm.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, target, *operands = line.replace(",", " ").split()
        x = [value(o) for o in operands]
        if name == "mov.b32":
            got = x[0]
        elif name == "shr.b32":
            got = x[0] >> x[1]
        elif name == "lop3.b32":
            assert x[3] == 0xEA  # the table of (a & b) | c
            got = x[0] & x[1] | x[2]
        elif name == "prmt.b32":
            source = [int(x[i // 4]) >> i % 4 * 8 & 255 for i in range(8)]
            got = np.uint32(sum(source[int(x[2]) >> 4 * i & 7] << 8 * i for i in range(4)))
        elif name == "add.rn.f16x2":
            got = (halves(x[0]) + halves(x[1])).view(np.uint32)[0]
        elif name == "fma.rn.f16x2":
            a, b, c = (halves(v).astype(np.float64) for v in x)
            got = (a * b + c).astype(np.float16).view(np.uint32)[0]
        else:
            raise AssertionError(f"unknown instruction {name}")
        registers[target] = got
    return halves(registers["$0"]).astype(np.float64)


def unwrap(f):
    return getattr(f, "fn", f)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("lift, middle", [(True, 0), (False, 0), (False, "half")])
def test_every_field_of_every_word(bits, lift, middle):
    middle = 2 ** (bits - 1) if middle == "half" else middle
    words = np.random.default_rng(0).integers(0, 2**16, 64).tolist() + [0, 0xFFFF]
    for part in range(16 // bits):
        asm = unwrap(kernels.unpack_asm)(part, bits, lift, middle)
        up = unwrap(kernels.lifted)(part, bits, lift)
        for low, high in pairwise(words):
            codes = np.array([w >> part * bits & 2**bits - 1 for w in (low, high)], float)
            want = 1024 + codes * unwrap(kernels.gain)(part, bits, lift) if up else codes - middle
            assert (run(asm, low | high << 16) == want).all(), (bits, part, lift, middle)
    lifts = [bool(unwrap(kernels.lifted)(part, bits, True)) for part in range(16 // bits)]
    assert lifts == {8: [True] * 2, 4: [False, True] * 2, 2: [False, False, False, True] * 2}[bits]
