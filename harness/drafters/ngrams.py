"""A trie of n-grams in bounded memory, and what follows each most often."""

from collections.abc import Sequence

ROOT = 0
Places = list[int]
"""Nodes of the last 0, 1, 2, ... tokens of a text, as many as are known: whatever ends a known n-gram is known too."""


class Trie:
    """N-grams of up to ``longest`` tokens and the tokens that follow them.

    It has at most ``max_nodes`` nodes besides the root, about 200 bytes each. Once full it learns no new n-gram and
    goes on counting those it has, so it depends on the order of texts and on nothing else.
    """

    def __init__(self, longest: int, max_nodes: int) -> None:
        self.longest = longest
        self.max_nodes = max_nodes
        self.children: dict[tuple[int, int], int] = {}
        self.tokens = [-1]
        self.counts = [0]
        self.best = [ROOT]  # each node's most frequent child, the latest of equals; ROOT where it has none

    def __len__(self) -> int:
        return len(self.children)

    def learn_all(self, text: Sequence[int]) -> None:
        """All n-grams of a text; none reaches over its ends."""
        places = [ROOT]
        for token in text:
            places = self.learn(places, token)

    def learn(self, places: Places, token: int) -> Places:
        """Count ``token`` behind each of ``places``; return the places behind it."""
        reached = [ROOT]
        for node in places:
            child = self.children.get((node, token))
            if child is None:
                if len(self) == self.max_nodes:
                    break
                child = self.children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.counts.append(0)
                self.best.append(ROOT)
            self.counts[child] += 1
            if self.best[node] == ROOT or self.counts[child] >= self.counts[self.best[node]]:
                self.best[node] = child
            reached.append(child)
        return reached[: self.longest + 1]

    def walk(self, places: Places, token: int) -> Places:
        """The places behind ``token``, with nothing learnt."""
        reached = [ROOT]
        for node in places:
            child = self.children.get((node, token))
            if child is None:
                break
            reached.append(child)
        return reached[: self.longest + 1]

    def continuation(self, node: int) -> int | None:
        """The token that followed most often, the latest of equally frequent ones; None where nothing did."""
        best = self.best[node]
        return None if best == ROOT else self.tokens[best]
