"""What a program decides by a number or a truth value that was read from a GPU, as its source says.

Such a value is made up, so it must not be what decides how much memory the program needs: errors do
not occur, a loop goes on until it shows nothing new, and of two sides of a branch each is taken.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice, pairwise
from opcode import opname
from types import CodeType
from typing import Final, Literal, NamedTuple

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_EXITS: Final = frozenset({"exit", "quit", "_exit", "fail", "_fail"})
_SAYS: Final = frozenset({
    "print", "format", "write", "item", "log", "debug", "info", "warning", "warn", "error"
})  # fmt: skip
_TESTS: Final = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT", "EXTENDED_ARG")


class Decision(NamedTuple):
    """What a value decides.

    Attributes:
        kind: whether there is an error, whether a loop goes on, which side of a branch is taken, or
            how many rounds a loop has.
        line: the first line of the loop or the branch.
        value: the truth value without an error, with which the loop goes on, or with which the side
            that does more is taken.
        is_bounded: whether the loop also ends otherwise.
        has_both: whether both sides of the branch do something.
    """

    kind: Literal["error", "loop", "branch", "count"]
    line: int
    value: bool = True
    is_bounded: bool = False
    has_both: bool = False


class _Source:
    """The expressions of a file by their place, and the parents of all nodes."""

    def __init__(self, filename: str) -> None:
        self.at: dict[tuple[int | None, ...], ast.expr] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        try:
            tree = ast.parse("".join(linecache.getlines(filename)))
        except (SyntaxError, ValueError, RecursionError):
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):
                place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
                self.at.setdefault(place, node)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def read_at(self, code: CodeType, instruction: int) -> ast.expr | None:
        """Return the expression whose value is read at an instruction, or tested by it."""
        number = instruction // 2
        while opname[code.co_code[2 * number]].startswith(_TESTS):
            number -= 1  # what made the value comes before its test
        return self.at.get(next(islice(code.co_positions(), number, None), ()))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield a node and those around it in its function, the innermost first."""
        found: ast.AST | None = node
        while found is not None and not isinstance(found, _FUNCTIONS):
            yield found
            found = self.parents.get(found)

    def loop_around(self, node: ast.AST) -> ast.For | ast.While | None:
        """Return the innermost loop whose body has a node."""
        inner = node
        for above in self.above(node):
            if isinstance(above, ast.For | ast.While) and inner in above.body:
                return above
            inner = above
        return None

    def after(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements that follow one in its block."""
        for _, block in ast.iter_fields(self.parents[statement]):
            if isinstance(block, list) and statement in block:
                return block[block.index(statement) + 1 :]
        return []


_source_of: Final = lru_cache(maxsize=16)(_Source)


@cache
def count_decision(code: CodeType, instruction: int) -> Decision | None:
    """Return the loop that a whole number read at an instruction gives its rounds, if any."""
    source = _source_of(code.co_filename)
    read = source.read_at(code, instruction)
    around = [] if read is None else [*source.above(read)]
    for below, one in pairwise(around):
        loops: list[ast.AST] = []
        if isinstance(one, ast.For) and one.iter is below:
            loops = [one]
        elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            within = ast.walk(source.parents.get(around[-1], around[-1]))
            loops = [loop for loop in within if _is_over(loop, one.targets[0].id)]
        if loops:
            return Decision("count", loops[0].lineno)  # type: ignore[attr-defined]
    return None


@cache
def decision(code: CodeType, instruction: int, *, compares: bool) -> Decision | None:
    """Return what the truth value that is read at an instruction decides, if that is known.

    Args:
        code: the code that reads it.
        instruction: the instruction that does.
        compares: whether it is the result of comparing numbers, else it may be any truth value.
    """
    source = _source_of(code.co_filename)
    node: ast.AST | None = source.read_at(code, instruction)
    if node is None or (compares and not isinstance(node, ast.Compare)):
        return None
    value, is_one_of, above = True, False, source.parents.get(node)
    while isinstance(above, ast.UnaryOp | ast.BoolOp | ast.Call):
        value = value != isinstance(above, ast.UnaryOp)
        is_one_of |= isinstance(above, ast.BoolOp)
        if isinstance(above, ast.Call) and _name(above) != "bool":
            return None
        node, above = above, source.parents.get(above)
    found: Decision | None = None
    match above:
        case ast.Assign(targets=[flag]):
            found = _of_flag(source.loop_around(above), flag, value=value)
        case ast.Assert(lineno=line, test=test) if test is node:
            found = Decision("error", line, value)
        case ast.While(test=test) if test is node:
            found = _of_loop(above, [], value=value, is_bounded=is_one_of)
        case ast.If(test=test) if test is node:
            found = _of_branch(source, above, value=value)
        case ast.IfExp(lineno=line, test=test, body=body, orelse=orelse) if test is node:
            found = _of_sides(line, [body], [orelse], value=value)
    return found


def _of_flag(loop: ast.AST | None, flag: ast.expr, *, value: bool) -> Decision | None:
    """Return the decision of a flag, if it is the condition of the loop that sets it."""
    if not isinstance(loop, ast.While):
        return None
    is_not = isinstance(loop.test, ast.UnaryOp)
    test = loop.test.operand if isinstance(loop.test, ast.UnaryOp) else loop.test
    is_test = ast.unparse(test) == ast.unparse(flag)
    return _of_loop(loop, [], value=value != is_not) if is_test else None


def _of_loop(
    loop: ast.For | ast.While, left_by: Sequence[ast.stmt], *, value: bool, is_bounded: bool = False
) -> Decision:
    """Return the decision about the end of a loop, which some of its code may bring."""
    nodes = {node for one in loop.body for node in ast.walk(one)}
    nodes -= {node for one in left_by for node in ast.walk(one)}
    is_left = any(isinstance(node, ast.Break | ast.Return) for node in nodes)
    is_counted = isinstance(loop, ast.For) or (left_by and not isinstance(loop.test, ast.Constant))
    return Decision("loop", loop.lineno, value, bool(is_bounded or is_left or is_counted))


def _of_branch(source: _Source, branch: ast.If, *, value: bool) -> Decision | None:
    sides = [branch.body, branch.orelse]
    for one, other in ((0, 1), (1, 0)):  # what follows is the other side of one that leaves
        if _end(sides[one]) and not _end(sides[other]):
            sides[other] = [*sides[other], *source.after(branch)]
    ends = [_end(side) for side in sides]
    loop = source.loop_around(branch)
    leaves = [isinstance(end, ast.Break | ast.Return) for end in ends]
    for number, end in enumerate(ends):
        is_other = value == bool(number)
        if isinstance(end, ast.Raise):
            return Decision("error", branch.lineno, is_other)
        if loop is not None and leaves[number] and not all(leaves):
            return _of_loop(loop, sides[number], value=is_other)
    return _of_sides(branch.lineno, *sides, value=value)


def _of_sides(
    line: int, body: Sequence[ast.AST], orelse: Sequence[ast.AST], *, value: bool
) -> Decision | None:
    work = _work(body), _work(orelse)
    is_first = work[0] >= work[1]
    return Decision("branch", line, value == is_first, has_both=all(work)) if any(work) else None


def _end(side: Sequence[ast.stmt]) -> ast.stmt | None:
    """Return the statement at which a side of a branch leaves at last; None = it goes on."""
    for one in side:
        if isinstance(one, ast.Break | ast.Return | ast.Continue | ast.Raise):
            return one
        if isinstance(one, ast.Expr) and _name(one.value) in _EXITS:
            return ast.Raise()
    return None


def _work(side: Sequence[ast.AST]) -> int:
    """Return how many calls there are in a side of a branch that do more than say something."""
    found = [node for one in side for node in ast.walk(one) if isinstance(node, ast.Call)]
    return sum(_name(call) not in _SAYS for call in found)


def _name(call: ast.AST) -> str:
    """Return the last part of the name of what is called, "" if nothing is."""
    called = getattr(call, "func", call)
    return getattr(called, "attr", getattr(called, "id", "")) if called is not call else ""


def _is_over(node: ast.AST, name: str) -> bool:
    """Return whether a node is a loop whose items are made from a name."""
    names = ast.walk(node.iter) if isinstance(node, ast.For) else ()
    return any(isinstance(one, ast.Name) and one.id == name for one in names)
