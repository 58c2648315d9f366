"""Conversations made from Python's standard library, so that the model learns to answer questions.

A docstring answers "what does it do", a function's source answers "write a function that ...", and
a chapter of the language reference answers "explain it". Questions are drawn from a few patterns.
Apart from the greetings below, answers contain only text of the library.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterable, Iterator

from tools.demo_model.corpus import Document
from tools.demo_model.interfaces import Interface

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant for Python programmers.",
    "Answer questions about Python.",
)
SYSTEM_SHARE = 0.3
LONGEST_DOCUMENTATION = 700
LONGEST_SOURCE = 1200

ABOUT = (
    "What does `{name}` do?",
    "What does {name} do?",
    "What does {name} do?",
    "What is `{name}` for?",
    "Explain {name}.",
    "How do I use `{name}`?",
    "Tell me about {name} in Python.",
)
WRITE = (
    "Write a function `{name}`: {summary}",
    "Write a function that {task}.",
    "Write a function that {task}.",
    "Write a Python function that {task}.",
    "Write a Python function {name} that {task}.",
    "Can you write a function called `{name}`? It {task}.",
)
WRITE_CLASS = (
    "Write a class `{name}`: {summary}",
    "Write a Python class {name}. {summary}",
)
EXPLAIN = (
    "Explain {title} in Python.",
    "What is {title} in Python?",
    "Tell me about {title}.",
)
GREETINGS = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hello, how are you?", "Good morning"),
        "Hello! Ask me about Python and its standard library.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Hello, who are you?"),
        "I am the demo model of Stepwell: a very small language model that has read "
        "Python's standard library and nothing else.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help"),
        "I can complete Python code and repeat what the standard library says of itself. "
        "I am small, so check what I say.",
    ),
    (("Thank you", "Thanks!", "Thank you very much"), "You are welcome."),
)
GREETING_REPEATS = 6

VERB = re.compile(r"^(Return|Get|Set|Create|Convert|Make|Check|Test|Compute|Find|Read|Write|Parse|"
                  r"Print|Remove|Add|Open|Close|Call|Run|Decode|Encode|Format|Build|Generate|Copy|"
                  r"Determine|Extract|Load|Split|Join|Replace|Register|Delete|Try|Yield|Send|"
                  r"Start|Stop|Update|Initialize|Raise|Handle|Wait|Process|Compare|Search|"
                  r"Iterate|Calculate|Apply|Compile|Insert|Sort|Escape|Quote|Match|Wrap|Look|"
                  r"Display|Show|List|Map|Move|Put|Save|Skip|Strip|Take|Transform|Walk|Reset)\b",
                  )  # fmt: skip


def conversation(question: str, answer: str, system: str | None = None) -> str:
    """A question and its answer as `CHAT_TEMPLATE` renders them, with the end of the answer."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return (
        f"{head}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    )


def chat_documents(
    interfaces: Iterable[Interface],
    sources: Iterable[Document],
    reference: Iterable[Document],
    seed: int,
) -> list[Document]:
    """All conversations as documents. `seed` selects question patterns and system prompts."""
    draw = random.Random(seed)
    exchanges = [
        *_about_interfaces(interfaces, draw),
        *_about_language(reference, draw),
        *(pair for source in sources for pair in _from_source(source, draw)),
        *(
            (question, answer)
            for questions, answer in GREETINGS
            for question in questions
            for _ in range(GREETING_REPEATS)
        ),
    ]
    documents = []
    for number, (question, answer) in enumerate(exchanges):
        system = draw.choice(SYSTEM_PROMPTS) if draw.random() < SYSTEM_SHARE else None
        documents.append(Document(f"chat/{number}", conversation(question, answer, system)))
    return documents


def leading_paragraphs(text: str, longest: int) -> str:
    """As many first paragraphs as fit into `longest` characters. The first may be truncated."""
    paragraphs = text.split("\n\n")
    taken = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(taken) + 2 + len(paragraph) > longest:
            break
        taken += "\n\n" + paragraph
    return taken[:longest].rstrip()


def as_task(summary: str) -> str | None:
    """Converts the verb of a docstring to the third person. None if it does not begin with a verb.

    >>> as_task("Return the name of the file."), as_task("Copies it."), as_task("A queue.")
    ('returns the name of the file', 'copies it', None)
    """
    summary = summary.rstrip(".")
    verb = VERB.match(summary)
    if verb:
        word = verb.group().lower()
        ending = summary[verb.end() :]
        if word.endswith("y"):
            return (word[:-1] + "ies" if word[-2] not in "aeiou" else word + "s") + ending
        return word + ("es" if word.endswith(("s", "sh", "ch", "x")) else "s") + ending
    first, _, rest = summary.partition(" ")
    if rest and re.fullmatch(r"[A-Z][a-z]+s", first) and first not in {"This", "Class", "Its"}:
        return f"{first.lower()} {rest}"
    return None


def _about_interfaces(
    interfaces: Iterable[Interface], draw: random.Random
) -> Iterator[tuple[str, str]]:
    for interface in interfaces:
        documentation = leading_paragraphs(interface.documentation, LONGEST_DOCUMENTATION)
        answer = f"`{interface.name}{interface.signature}`\n\n{documentation}"
        yield draw.choice(ABOUT).format(name=interface.name), answer


def _about_language(
    reference: Iterable[Document], draw: random.Random
) -> Iterator[tuple[str, str]]:
    for chapter in reference:
        heading, _, text = chapter.text.partition("\n")
        title = heading.strip().removesuffix(".")
        title = title[0].lower() + title[1:] if title[1:2].islower() else title
        text = text.partition("\n")[2].strip()  # without the line under the heading
        if text:
            answer = leading_paragraphs(text, LONGEST_DOCUMENTATION)
            for pattern in draw.sample(EXPLAIN, 2):
                yield pattern.format(title=title), answer


def _from_source(source: Document, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yields a pair of a question and an answer for each short function and class with a docstring.
    The answer is its source.
    """
    try:
        tree = ast.parse(source.text)
    except SyntaxError:  # a removed line with names of authors was part of a statement
        return
    lines = source.text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        documentation = ast.get_docstring(node)
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not documentation or len(code) > LONGEST_SOURCE:
            continue
        summary = " ".join(documentation.split("\n\n")[0].split())
        if not 15 <= len(summary) <= 160:
            continue
        task = as_task(summary)
        if isinstance(node, ast.ClassDef):
            pattern = draw.choice(WRITE_CLASS)
        else:
            pattern = draw.choice(WRITE) if task else WRITE[0]
        question = pattern.format(name=node.name, summary=summary, task=task)
        yield question, f"```python\n{textwrap.dedent(code).rstrip()}\n```"
