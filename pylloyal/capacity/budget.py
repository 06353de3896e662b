"""What of a device's memory a plan may take."""
from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgumentError
from .devices import Pool
from .weights import HOST


@dataclass(frozen=True, slots=True)
class Policy:
    """How much is left to others.

    Attributes
    ----------
    headroom_percent : int
        Of what a plan could take, left untaken: what the system and we did not count.
    reserve_percent : int
        Of an accelerator, left to its other users: a desktop, a browser.
    least_reserve_bytes : int
        The same, at least; but never more than a quarter of it.
    least_tokens : int
        A context chosen by itself is at least so long, or the model's ceiling, or it is refused.
    """

    headroom_percent: int = 10
    reserve_percent: int = 10
    least_reserve_bytes: int = 512 << 20
    least_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("headroom_percent", "reserve_percent"):
            if not 0 <= getattr(self, name) <= 100:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; 0 to 100 can be")
        for name in ("least_reserve_bytes", "least_tokens"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Budget:
    """One device as it was when the plan was made.

    Attributes
    ----------
    device : int
        ``HOST``, or the number of an accelerator.
    name : str
    total, free : int or None
        Bytes; None: not known, and then nothing is planned on it.
    reserve, headroom : int
        Bytes left to others, and left over.
    """

    device: int
    name: str
    total: int | None
    free: int | None
    reserve: int
    headroom: int

    @classmethod
    def of(cls, device: int, pool: Pool, policy: Policy) -> Budget:
        total, free = pool.total(), pool.free()
        if free is None:
            return cls(device, pool.name, total, None, 0, 0)
        reserve = 0
        if device != HOST and total is not None:
            reserve = min(free, total // 4, max(policy.least_reserve_bytes, total * policy.reserve_percent // 100))
        return cls(device, pool.name, total, free, reserve, (free - reserve) * policy.headroom_percent // 100)

    @property
    def is_known(self) -> bool:
        return self.free is not None

    @property
    def bytes(self) -> int:
        """What a plan may take."""
        return 0 if self.free is None else self.free - self.reserve - self.headroom

    @property
    def used_by_others(self) -> int:
        return 0 if self.total is None or self.free is None else max(0, self.total - self.free)
