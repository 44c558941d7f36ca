"""A request on its way: what was asked, what has been computed, and when."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

WAITING, RUNNING, SWAPPED, FINISHED = "waiting", "running", "swapped", "finished"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the likeliest; ``top_p``: the smallest set of tokens with so much probability; ``seed``: the request's own
    dice. ``stop``: texts that end it and are not given out. Raises ``ValueError`` for what is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), int | float) or isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is no number")
        if not isinstance(self.max_new_tokens, int) or isinstance(self.max_new_tokens, bool) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r} is out of range (allowed: 1 or more)")
        if self.temperature != 0 and not 0.01 <= self.temperature <= 100.0:
            raise ValueError(f"temperature={self.temperature!r} is out of range (allowed: 0, or 0.01 to 100.0)")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed!r} is out of range (allowed: 0 to {(1 << 63) - 1})")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p!r} is out of range (allowed: above 0.0 and up to 1.0)")
        if not isinstance(self.stop, tuple | list):
            raise ValueError(
                f"stop={self.stop!r} is {'one text' if isinstance(self.stop, str) else 'no text'} (allowed: a tuple of texts)"
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop={self.stop!r}: each must be a text of one character or more")


@dataclass(eq=False)
class Request:
    """``prompt``: token ids. ``arrival`` and ``deadline`` in seconds of the caller's clock. ``salt``: the tenant, whose prefixes are shared with nobody else.

    State: ``output`` token ids made so far; ``computed``: how many of all tokens have keys and values in ``blocks`` (-1: a block that fell out of a window);
    ``cached``: how many of the prompt were taken from the prefix tree when it was admitted; ``finished``: when; ``times``: of each token.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    arrival: float = 0.0
    deadline: float | None = None
    salt: Hashable = None

    status: str = WAITING
    reason: str = ""  # why it finished: stop, length, cancelled, deadline, error
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    layout: list[bool] = field(default_factory=list)  # while it is put away: which of its blocks there were
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    admitted: float | None = None
    finished: float | None = None
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            hash(self.salt)
        except TypeError as error:
            raise ValueError(
                f"request {self.id!r}: salt={self.salt!r} cannot tell tenants apart (allowed: text, a number, anything with a hash)"
            ) from error
        if self.deadline is not None and not self.deadline >= self.arrival:
            raise ValueError(f"request {self.id!r}: the deadline {self.deadline} is no time after its arrival")
        if not self.prompt:
            raise ValueError(f"request {self.id!r}: the prompt is empty (allowed: 1 token or more)")

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output."""
        return (*self.prompt, *self.output)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def most(self) -> int:
        """Tokens that it may have in the end."""
        return len(self.prompt) + self.sampling.max_new_tokens

    @property
    def left(self) -> int:
        """Tokens that have no keys and values yet; the last of them makes a new token."""
        return self.length - self.computed

    @property
    def first_token_time(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return self.times[0] - self.arrival if self.times else None
