"""The document that is questioned, and 32 questions on it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .setting import Setting

# In a clone; the wheel does not have it.
CHAPTER = Path(__file__).resolve().parents[2] / "fixtures" / "texts" / "moby_dick_1.txt"

QUESTIONS = (
    "Who is telling the story?", "Why does he go to sea?", "What do the people of the city do on a Sunday afternoon?", "Does he go as a passenger, a cook or a sailor?",
    "What does he say about water and meditation?", "Who pays him, and what does he think of being paid?", "What does he say about the whale itself?",
    "What is the name of the city?", "What does he do when it is November in his soul?", "What stands on the hills of the picture that he imagines?", "What story of a Greek youth does he tell?",
    "What does he think of cooks?", "What does he say about schoolmasters who go to sea?", "What is a sailor's place on the ship?", "Who ain't a slave, in his words?",
    "What does he say about the air on the forecastle?", "Which part of the voyage does he say the Fates arranged?", "What is printed above and below his name on the bill?",
    "Which battle stands on the bill of Providence?", "What are the two orchard thieves?", "What does he say about men in the fields?", "What do landsmen do when they reach the edge of the land?",
    "What would a man in a desert need, if he had a professor of metaphysics with him?", "Why did the poor poet of Tennessee buy a coat?", "What did the Persians hold about the sea?",
    "What kind of voyages does he usually take?", "What made him choose a whaling voyage?", "What does he feel for things remote?", "What floats in front of him at the end of the chapter?",
    "What colour is the phantom at the end?", "How much money did he have in his purse?", "What is the mood of the first sentence?",
)


@dataclass(frozen=True)
class Work:
    """What every side is asked, as token ids.

    Attributes
    ----------
    source : str
        Where the document is from, for a person.
    """

    document: list[int]
    questions: list[list[int]]
    n_tokens: int
    source: str

    def first(self, n: int) -> Work:
        """The same document and the first questions alone."""
        return Work(self.document, self.questions[:n], self.n_tokens, self.source)

    def small(self) -> Work:
        """Hardly any work: what a side does before it is measured."""
        return Work(self.document[:32], self.questions[:2], 2, self.source)

    @property
    def n_cells(self) -> int:
        """Cells that a side takes which keeps the document once."""
        return len(self.document) + sum(len(question) + self.n_tokens for question in self.questions)


def work(setting: Setting, n_document: int, n_tokens: int, chapter: Path = CHAPTER) -> Work:
    """The chapter's first ``n_document`` tokens; where it is not at hand, a text of the benchmark's own, and the work says so."""
    if chapter.exists():
        text = setting.begin(chapter.read_text(encoding="utf-8"))
        source = f"the first {n_document:,} tokens of Moby-Dick, chapter 1"
    else:
        text, source = setting.tokens, f"{n_document:,} tokens of a text that repeats itself, for {chapter.name} is not at hand"
    if len(text) < n_document:
        text, source = setting.tokens, f"{n_document:,} tokens of a text that repeats itself, for the chapter is shorter"
    return Work(list(text[:n_document]), setting.encode(asked(QUESTIONS)), n_tokens, source)


def asked(questions: Sequence[str]) -> list[str]:
    """As they follow the document."""
    return [f"\n\nQuestion: {question}\nAnswer:" for question in questions]
