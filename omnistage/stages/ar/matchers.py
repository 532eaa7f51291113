"""Which tokens a request's grammar permits next, for all rows of a step at once; by llguidance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from tokenizers import Tokenizer
from torch import Tensor

from omnistage.errors import RequestError
from omnistage.stages.ar.grammar import one_line, parser_limits
from omnistage.stages.ar.torch_model import ModelShape

# Compiled grammars that are kept for requests to come.
_KEPT = 32


class Matching:
    """How far one request has come in its grammar.

    It follows the tokens that the request has, so a step that is repeated, a preemption or a replay changes nothing.
    """

    __slots__ = ("_param", "_taken", "matcher")

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self.matcher = matcher
        self._param = param
        self._taken = 0

    def catch_up(self, generated: Sequence[int]) -> None:
        """Follows all generated tokens. Raises RequestError when the grammar is too complex to go on."""
        self.matcher.consume_tokens(list(generated[self._taken :]))
        self._taken = len(generated)
        self.check()

    def check(self) -> None:
        if self.matcher.is_error():
            raise RequestError(f"{self._param}: {one_line(self.matcher.get_error())}", param=self._param)


class Matchers:
    """Compiles grammars for one tokenizer and computes masks over the model's vocabulary.

    The library's view of the tokenizer is built when the first grammar is asked for.
    """

    def __init__(self, tokenizer: Tokenizer, shape: ModelShape) -> None:
        self._tokenizer = tokenizer
        self._shape = shape
        self._vocabulary: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._size = max(shape.vocab_size, tokenizer.get_vocab_size())

    def open(self, grammar: str, param: str) -> Matching:
        """A matcher at the beginning of a text. Raises RequestError naming `param`."""
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._known(param), grammar, log_level=0, limits=parser_limits())
            Matching(compiled, param).check()
        self._compiled[grammar] = compiled
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return Matching(compiled.deep_copy(), param)

    def permitted(self, matchings: Sequence[Matching]) -> Tensor:
        """Tokens that may come next, bool [len(matchings), V]. Raises RequestError when a grammar permits none."""
        if self._executor is None:
            self._executor = LLExecutor(num_threads=torch.get_num_threads())
        bits = allocate_token_bitmask(len(matchings), self._size)
        pairs = [(one.matcher, index) for index, one in enumerate(matchings)]
        fill_next_token_bitmask_par(self._executor, pairs, bits)
        for one in matchings:
            one.check()
        flags = np.unpackbits(bits.view(np.uint8), axis=1, count=self._shape.vocab_size, bitorder="little")
        return torch.from_numpy(flags.view(np.bool_)).to(self._shape.device)

    def _known(self, param: str) -> LLTokenizer:
        if self._vocabulary is None:
            ends = sorted(self._shape.eos_token_ids)
            if not ends:
                raise RequestError(f"{param}: the model has no token that ends a text", param=param)
            plain = Tokenizer.from_str(self._tokenizer.to_str())
            plain.no_padding()
            plain.no_truncation()
            self._vocabulary = LLTokenizer(plain.to_str(), n_vocab=self._size, eos_token=ends)
        return self._vocabulary
