"""Modules that trip trainers up, each with its loss. All are built alike on every rank."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.training import draw


def parameter(*shape: int, key: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(draw(key, 7, shape=shape).to(dtype))


class Part(nn.Module):
    """A unit with a matrix, a vector and a norm."""

    def __init__(self, key: int, width: int = 5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = parameter(width, width, key=key, dtype=dtype)
        self.bias = parameter(width, key=key + 1, dtype=dtype)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(F.linear(x.to(self.weight.dtype), self.weight, self.bias))
        return self.norm(x.to(self.norm.weight.dtype))


class Base(nn.Module):
    """Three parts one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(key) for key in (10, 20, 30))

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Sizes(Base):
    """Parameters of 8, 0 and 24 elements, then of 1; one transposed; one on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Module()
        self.tiny.eight = parameter(8, key=1)
        self.tiny.none = nn.Parameter(torch.empty(0, 3))
        self.tiny.many = parameter(4, 6, key=2)
        self.tiny.one = parameter(key=3)
        self.tiny.forward = lambda x: x * self.tiny.one + self.tiny.eight.sum() * 0.1 + self.tiny.many.tanh().mean()
        self.turned = nn.Module()
        self.turned.weight = nn.Parameter(draw(4, 7, shape=(5, 3)).t())
        self.turned.forward = lambda x: F.linear(F.linear(x, self.turned.weight), self.turned.weight.t())
        self.scale = parameter(5, key=5)
        self.hollow = nn.Module()  # a unit of an empty parameter alone
        self.hollow.none = nn.Parameter(torch.empty(2, 0))
        self.hollow.forward = lambda x: x + self.hollow.none.sum()

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        return super().forward(self.turned(self.tiny(self.hollow(x))) * self.scale, step, leaf, micro)


class OnlyTiny(nn.Module):
    """Case 19 to the letter: on 4 ranks one of them owns padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = parameter(8, key=1), parameter(0), parameter(24, key=2), parameter(1, key=3)

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        return x * self.a.sum() + self.b.sum() + self.c.tanh().sum() * self.d


class Unused(Base):
    """A whole unit that no leaf uses, a vector that one step skips, one that only a leaf's first micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Part(40)
        self.sometimes = Part(50)
        self.first = Part(60)

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        if step != 1:
            x = self.sometimes(x)
        if micro == 0:
            x = self.first(x)
        return super().forward(x, step, leaf, micro)


class Sparse(Base):
    """A unit that only one leaf uses."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = Part(40)

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        return super().forward(self.rare(x) if leaf == 2 else x, step, leaf, micro)


class Mixed(Base):
    """Two working dtypes in one model, and in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(10, dtype=torch.bfloat16), Part(20), Part(30, dtype=torch.bfloat16)])


class Shared(Base):
    """One parameter that two units use, and one module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts[2].weight = self.parts[0].weight
        self.groups = nn.ModuleDict({"a": Part(70)})

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        return self.groups["a"](super().forward(self.groups["a"](x), step, leaf, micro))


class Frozen(Base):
    """A frozen unit, a frozen vector in a trained one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts[0].requires_grad_(False)
        self.parts[1].bias.requires_grad_(False)
        self.register_buffer("shift", draw(80, shape=(5,)))

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        return super().forward(x + self.shift, step, leaf, micro)


class Half(Base):
    """bf16 working weights throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor, step: int, leaf: int, micro: int) -> Tensor:
        return super().forward(x.to(torch.bfloat16), step, leaf, micro).float()


MODULES = {
    "sizes": Sizes,
    "only-tiny": OnlyTiny,
    "unused": Unused,
    "mixed": Mixed,
    "shared": Shared,
    "frozen": Frozen,
    "half": Half,
}


def loss_of(model: nn.Module, step: int, leaf: int, micro: int) -> tuple[Tensor, int]:
    """Sum of squared distances to keyed targets over 3 rows, `tokens` = 3."""
    x, y = draw(step, leaf, micro, 1, shape=(3, 5)), draw(step, leaf, micro, 2, shape=(3, 5))
    return (model(x, step, leaf, micro) - y).square().sum(), 3
