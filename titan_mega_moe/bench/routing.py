"""Which experts the tokens of a benchmark go to: one function a kind, and a file of recorded ids.

A kind may also change how many tokens a rank has. Everything is drawn from the generator handed in, a rank's
own.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from titan_mega_moe.config import ConfigError


@dataclass(frozen=True)
class Place:
    """Where ids are made for: T tokens of rank `rank` out of `ep`, E experts, K slots a token."""

    T: int
    E: int
    K: int
    ep: int
    rank: int


@dataclass(frozen=True)
class Routing:
    """A kind and its argument, written kind or kind:argument: "random", "skewed:7", "file:ids.pt"."""

    kind: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind

    def tokens(self, T: int, ep: int, rank: int) -> int:
        """How many of at most T tokens the rank has."""
        if self.kind == "empty":
            return 0 if rank == ep - 1 else T
        if self.kind == "ragged":
            return T - rank * T // (ep + 1)
        return T

    def ids(self, place: Place, g: torch.Generator) -> torch.Tensor:
        """(T, K) int64 expert ids in [-1, E) on the generator's device."""
        if self.kind == "file":
            ids_NK = _read(self.argument)
            return ids_NK[place.rank * place.T : (place.rank + 1) * place.T].to(g.device)
        if self.kind == "skewed":
            return _skewed(place, g, float(self.argument))
        return KINDS[self.kind](place, g)

    def refusal(self, T: int, E: int, K: int, ep: int) -> str | None:
        """One sentence on why ids of these sizes cannot be made, or None."""
        if self.kind == "same-expert" and E // ep < K:
            # Buffers are sized for distinct experts.
            return f"a token may have at most {E // ep} rows on a rank with so many experts, not {K}"
        if self.kind == "skewed":
            return _skewed_refusal(float(self.argument), E, K, ep)
        if self.kind == "file":
            ids_NK = _read(self.argument)
            if ids_NK.shape[1] != K:
                return f"its {ids_NK.shape[1]} ids a token are not the {K} that the layer wants"
            if ids_NK.shape[0] < T * ep:
                return f"it holds {ids_NK.shape[0]} tokens, {ep} ranks of {T} need {T * ep}: use a smaller T"
            low, high = (int(v) for v in torch.aminmax(ids_NK))
            if low < -1 or high >= E:
                return f"it holds id {low if low < -1 else high}, outside [-1, {E})"
        return None


def parse(text: str) -> list[Routing]:
    """Comma-separated routings. Raises ConfigError for one that is not known or whose argument is wrong."""
    return [_parse(word) for word in dict.fromkeys(text.split(","))]


def _parse(word: str) -> Routing:
    kind, _, argument = word.partition(":")
    if kind == "skewed":
        argument = argument or "7"
        try:
            good = 0 < float(argument) < float("inf")
        except ValueError:
            good = False
        if not good:
            raise ConfigError(f"--routing {word}: skewed takes a ratio above 0, such as skewed:7")
        return Routing(kind, argument)
    if kind == "file":
        _read(argument)
        return Routing(kind, argument)
    if kind not in KINDS or argument:
        known = ", ".join([*KINDS, "skewed:RATIO", "file:PATH"])
        raise ConfigError(f"--routing {word}: not a kind of routing; known: {known}")
    return Routing(kind)


def _read(path: str) -> torch.Tensor:
    """A tensor saved by torch.save, (tokens, K) or (ranks, tokens, K), as (N, K)."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):  # of what is refused below
            ids = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"--routing file:{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # anything may be in a file that torch.save did not write
        raise ConfigError(f"--routing file:{path}: torch.load cannot read it ({type(error).__name__})") from None
    found = _kind_of(ids)
    if found != "torch.int64" or ids.dim() not in (2, 3) or not len(ids):
        found += f" {tuple(ids.shape)}" if found.startswith("torch.") else ""
        raise ConfigError(f"--routing file:{path}: needs (tokens, K) or (ranks, tokens, K) torch.int64, got {found}")
    return ids.flatten(0, -2)


def _kind_of(ids: object) -> str:
    """The dtype of a tensor that holds its values one after another; of anything else what it is."""
    if not isinstance(ids, torch.Tensor):
        return type(ids).__name__
    if ids.is_nested:
        return "a nested tensor"
    if ids.layout != torch.strided:
        return f"a tensor of layout {ids.layout}"
    return str(ids.dtype) if ids.device.type == "cpu" else f"a tensor on {ids.device}, without values"


def _distinct(T: int, E: int, K: int, g: torch.Generator) -> torch.Tensor:
    """K of E experts for each token, in random order."""
    return torch.rand(T, E, generator=g, device=g.device).topk(K, dim=1).indices


def _balanced(p: Place, g: torch.Generator) -> torch.Tensor:
    slots = torch.arange(p.T * p.K, device=g.device) + p.rank * p.T * p.K
    return (slots % p.E).view(p.T, p.K)


def _random(p: Place, g: torch.Generator) -> torch.Tensor:
    return _distinct(p.T, p.E, p.K, g)


def _one_expert(p: Place, g: torch.Generator) -> torch.Tensor:
    # The others are distinct experts from 1 on, so that a token names none twice.
    first = torch.zeros(p.T, 1, dtype=torch.int64, device=g.device)
    return torch.cat([first, 1 + _distinct(p.T, p.E - 1, p.K - 1, g)], 1) if p.K > 1 else first


def _only_expert(p: Place, g: torch.Generator) -> torch.Tensor:
    ids_TK = torch.full((p.T, p.K), -1, device=g.device)
    ids_TK[:, 0] = 0
    return ids_TK


def _same_expert(p: Place, g: torch.Generator) -> torch.Tensor:
    return torch.full((p.T, p.K), p.E // 2, device=g.device)


def _holes(p: Place, g: torch.Generator) -> torch.Tensor:
    empty = torch.rand(p.T, p.K, generator=g, device=g.device) < 0.4
    return _random(p, g).masked_fill(empty, -1)


def _nowhere(p: Place, g: torch.Generator) -> torch.Tensor:
    return torch.full((p.T, p.K), -1, device=g.device)


KINDS: dict[str, Callable[[Place, torch.Generator], torch.Tensor]] = {
    "balanced": _balanced,
    "random": _random,
    "one-expert": _one_expert,  # every token's first slot goes to expert 0
    "only-expert": _only_expert,  # and its other slots have none
    "same-expert": _same_expert,  # every slot goes to one expert
    "holes": _holes,  # four slots in ten have no expert
    "nowhere": _nowhere,  # no slot has one
    "empty": _random,  # the last rank has no tokens
    "ragged": _random,  # token counts differ between ranks
}


def _skewed_refusal(ratio: float, E: int, K: int, ep: int) -> str | None:
    if ep == 1:
        return "rank skew needs at least 2 ranks"
    share, e = K * ratio / (ratio + ep - 1), E // ep
    if share > e or K - share > E - e:
        return f"{share:.1f} of {K} distinct experts a token cannot be on rank 0, which has {e} of {E}"
    return None


def _skewed(p: Place, g: torch.Generator, ratio: float) -> torch.Tensor:
    """Rank 0's experts get `ratio` times the rows of any other rank's; a token names no expert twice."""
    e = p.E // p.ep
    slots = torch.arange(p.T * p.K, device=g.device, dtype=torch.float64)
    share = ratio / (ratio + p.ep - 1)
    first_TK = (((slots + 1) * share).floor() > (slots * share).floor()).view(p.T, p.K)
    # What rounding asks of a token beyond the experts there are goes to the other side.
    first_TK &= first_TK.cumsum(1) <= e
    first_TK |= (~first_TK).cumsum(1) > p.E - e
    nth_TK = first_TK.cumsum(1) - 1
    on_first = _distinct(p.T, e, min(p.K, e), g)
    on_others = e + _distinct(p.T, p.E - e, min(p.K, p.E - e), g)
    other_TK = (~first_TK).cumsum(1) - 1
    return torch.where(
        first_TK,
        on_first.gather(1, nth_TK.clamp(0, on_first.shape[1] - 1)),
        on_others.gather(1, other_TK.clamp(0, on_others.shape[1] - 1)),
    )
