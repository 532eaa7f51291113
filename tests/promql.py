"""Evaluates the part of PromQL that the dashboard uses, over two scrapes: selectors, rate, sum and max by labels,
histogram_quantile, division. Semantics: the Prometheus documentation, "Querying"; a rate is the difference of the two
scrapes over the seconds between them."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import inf, isinf, nan

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_TOKEN = re.compile(r"\s*(?:(\d+\.\d+|\d+[smh]?)|([a-zA-Z_:][\w:]*)|(.))")


@dataclass
class Scrapes:
    """Samples by metric name, at two times."""

    before: dict[str, Vector]
    after: dict[str, Vector]
    seconds: float


def read(text: str) -> dict[str, Vector]:
    found: dict[str, Vector] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][frozenset(sample.labels.items())] = sample.value
    return found


class Query:
    """One expression; `names` and `labels` are those that it mentions, labels by metric."""

    def __init__(self, text: str, scrapes: Scrapes) -> None:
        self._tokens = [next(group for group in match.groups() if group) for match in _TOKEN.finditer(text)]
        self._at = 0
        self._scrapes = scrapes
        self.names: list[str] = []
        self.labels: set[str] = set()

    def evaluate(self) -> Vector:
        """Raises ValueError for what it cannot read, KeyError for a metric that is not exposed."""
        value = self._quotient()
        if self._at != len(self._tokens):
            raise ValueError(f"unread: {self._tokens[self._at :]}")
        return value

    def _next(self, *wanted: str) -> str:
        token = self._tokens[self._at]
        if wanted and token not in wanted:
            raise ValueError(f"{token!r} instead of {wanted}")
        self._at += 1
        return token

    def _is(self, token: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at] == token

    def _quotient(self) -> Vector:
        left = self._term()
        if not self._is("/"):
            return left
        self._next("/")
        right = self._term()
        return {labels: left[labels] / right[labels] if right[labels] else nan for labels in left.keys() & right.keys()}

    def _term(self) -> Vector:
        name = self._next()
        if name in ("sum", "max"):
            return self._aggregate(name)
        if name == "rate":
            return self._rate()
        if name == "histogram_quantile":
            return self._quantile()
        return self._selected(name, self._scrapes.after)

    def _selected(self, name: str, scrape: dict[str, Vector]) -> Vector:
        self.names.append(name)
        if name not in self._scrapes.after:
            raise KeyError(name)
        return scrape[name]

    def _rate(self) -> Vector:
        self._next("(")
        name = self._next()
        after = self._selected(name, self._scrapes.after)
        for token in ("[", "1m", "]", ")"):
            self._next(token)
        before = self._scrapes.before.get(name, {})
        return {labels: (value - before.get(labels, 0.0)) / self._scrapes.seconds for labels, value in after.items()}

    def _aggregate(self, operation: str) -> Vector:
        by = self._names() if self._is("by") else []
        self._next("(")
        inner = self._quotient()
        self._next(")")
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in inner.items():
            if by and not set(by) <= {name for name, _ in labels}:
                raise KeyError(f"{by} of {dict(labels)}")
            groups[frozenset(pair for pair in labels if pair[0] in by)].append(value)
        self.labels.update(by)
        return {labels: sum(values) if operation == "sum" else max(values) for labels, values in groups.items()}

    def _names(self) -> list[str]:
        self._next("by")
        self._next("(")
        names = [self._next()]
        while self._next(",", ")") == ",":
            names.append(self._next())
        return names

    def _quantile(self) -> Vector:
        self._next("(")
        q = float(self._next())
        self._next(",")
        buckets = self._quotient()
        self._next(")")
        series: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
        for labels, value in buckets.items():
            bound = dict(labels)["le"]
            series[frozenset(pair for pair in labels if pair[0] != "le")].append((float(bound), value))
        return {labels: quantile(q, sorted(each)) for labels, each in series.items()}


def quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    """Linear within the bucket that holds it; the lower bound of the last one, which is open."""
    total = buckets[-1][1]
    if total == 0 or not isinf(buckets[-1][0]):
        return nan
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= q * total:
            return lower if bound == inf else lower + (bound - lower) * (q * total - below) / (count - below)
        lower, below = bound, count
    return lower
