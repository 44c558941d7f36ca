"""Tasks with an answer that is right or wrong: what perplexity hides. One file a task; a new one registers itself."""

from kvlab.measure.tasks.base import TASKS, Answer, Case, Question, Score, Task, from_dict
from kvlab.measure.tasks.copying import Copying
from kvlab.measure.tasks.correction import Correction
from kvlab.measure.tasks.instruction import Instruction
from kvlab.measure.tasks.keys import AskedTwice, Needle, PassKeys, TwoKeys, needle, two_keys
from kvlab.measure.tasks.own import Own
from kvlab.measure.tasks.speed import Speed
from kvlab.measure.tasks.text import Text
from kvlab.measure.tasks.variables import Variables

__all__ = [
    "TASKS", "Answer", "AskedTwice", "Case", "Copying", "Correction", "Instruction", "Needle", "Own", "PassKeys", "Question", "Score", "Speed", "Task", "Text", "TwoKeys",
    "Variables", "from_dict", "needle", "two_keys",
]  # fmt: skip
