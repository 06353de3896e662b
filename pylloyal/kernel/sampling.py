"""How a branch draws its tokens."""
from __future__ import annotations

from dataclasses import dataclass

from .._ffi import capi
from .._ffi.memory import MASK64, new


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of a branch's sampler; equal settings are a no-op.

    The order is: grammar, bias and steering, penalties, ``top_k``, ``typical_p``, ``top_p``, ``min_p``, ``temperature``, draw. A branch whose
    settings change keeps its random stream and penalty window, so a temperature may follow the text token by token.

    Parameters
    ----------
    temperature : float
        Above 0 draws at random; 0 or below takes the most likely token.
    top_k : int
        Keep the k most likely tokens; 0 or below keeps all.
    top_p : float
        Keep the smallest set of most likely tokens whose probabilities reach this sum; 1 keeps all.
    min_p : float
        Drop tokens less likely than this share of the most likely one; 0 drops none.
    typical_p : float
        Keep the tokens of most typical surprise up to this sum; 1 keeps all.
    penalty_repeat, penalty_frequency, penalty_presence : float
        Against tokens of the last ``penalty_last_n`` drawn ones: 1, 0 and 0 are off.
    penalty_last_n : int
        Length of that window, in tokens.
    ignore_eog : bool
        Never draw a token that ends a generation: what is written goes on until something else stops it.
    seed : int or None
        The random stream: a new one, or the one that is there, as far as it has come, when it has that seed already. None keeps what
        is there (a new branch gets one from the operating system); :meth:`Branch.reseed` begins a stream anew.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    penalty_repeat: float = 1.0
    penalty_frequency: float = 0.0
    penalty_presence: float = 0.0
    penalty_last_n: int = 64
    ignore_eog: bool = False
    seed: int | None = None

    @classmethod
    def greedy(cls) -> Sampling:
        """Always the most likely token."""
        return cls(temperature=0.0)

    def _struct(self) -> capi.pyl_sampling:
        return new(
            capi.pyl_sampling, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, typical_p=self.typical_p,
            penalty_repeat=self.penalty_repeat, penalty_frequency=self.penalty_frequency, penalty_presence=self.penalty_presence, penalty_last_n=self.penalty_last_n, ignore_eog=self.ignore_eog,
            seed_mode=capi.SEED_KEEP if self.seed is None else capi.SEED_SET, seed=(self.seed or 0) & MASK64)

    @classmethod
    def _of(cls, s: capi.pyl_sampling) -> Sampling:
        return cls(s.temperature, s.top_k, s.top_p, s.min_p, s.typical_p, s.penalty_repeat, s.penalty_frequency, s.penalty_presence, s.penalty_last_n, bool(s.ignore_eog), s.seed)
