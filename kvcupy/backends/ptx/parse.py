"""PTX text to kernels: a flat list of instructions with operands taken apart, and where their lines come from.

PTX is a list of statements ended by `;`. Braces at the start of a statement open a scope with registers of its own
(inline assembly does that), so a name is looked up in the scopes from the inside out and becomes a register number.
Labels become positions in the list. `.loc` gives each instruction its line in the CUDA source; for code inlined
from CUDA's own headers that is the line that called it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath

from kvcupy.backends.ptx.types import width_of

__all__ = [
    "Guard",
    "Imm",
    "Instruction",
    "Kernel",
    "Line",
    "Mem",
    "Not",
    "Operand",
    "Pair",
    "Param",
    "Reg",
    "Special",
    "Sym",
    "Variable",
    "Vec",
    "parse",
]


@dataclass(frozen=True)
class Reg:
    index: int
    bits: int


@dataclass(frozen=True)
class Imm:
    """A constant. For a float literal, value is its bit pattern and width its number of bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Not:
    """A predicate, negated."""

    predicate: Reg


@dataclass(frozen=True)
class Special:
    """A register that the hardware fills, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Sym:
    """The address of a variable or a parameter in its own state space."""

    name: str


@dataclass(frozen=True)
class Mem:
    base: Reg | Sym | Imm
    offset: int


@dataclass(frozen=True)
class Vec:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two results, written `d|p`."""

    value: Operand
    predicate: Operand


Operand = Reg | Not | Imm | Special | Sym | Mem | Vec | Pair | None
"""None is the sink `_`."""


@dataclass(frozen=True)
class Guard:
    predicate: Reg
    negated: bool


@dataclass(frozen=True)
class Line:
    """A line of the CUDA source, and the line that called it, where the compiler inlined a function."""

    file: str
    number: int
    caller: Line | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" + (f" (from {self.caller})" if self.caller else "")


@dataclass(frozen=True)
class Instruction:
    text: str
    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: Line

    def has(self, *parts: str) -> bool:
        return any(part in self.parts for part in parts)

    def one_of(self, *parts: str) -> str | None:
        """The first of its modifiers that is among parts."""
        return next((part for part in self.parts[1:] if part in parts), None)


@dataclass(frozen=True)
class Param:
    """A parameter: a scalar of a PTX type, or, with type "bytes", a struct passed by value."""

    name: str
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Variable:
    """A variable outside registers. data is None where PTX gives no initial value."""

    name: str
    space: str
    nbytes: int
    align: int
    data: bytes | None = None


@dataclass
class Kernel:
    name: str
    params: list[Param]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[Reg] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    """Shared and local variables, and the shared ones of the module."""
    dynamic_shared: list[str] = field(default_factory=list)
    """Names of `extern __shared__` arrays: all start where the static ones end."""


@dataclass
class Module:
    kernels: dict[str, Kernel]
    variables: list[Variable]
    """.global and .const variables."""


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^{;]*)\{", re.S)
_FUNCTION = re.compile(r"\.func\b[^;{]*?([\w$]+)\s*\([^;{]*\{", re.S)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:,\s*function_name\s+\S+,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_LABEL = re.compile(r"([\w$]+):(?!:)")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)*\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_HEADERS = re.compile(r"(?:^|/)(?:cuda\w*|crt/\w+|device_\w+|sm_\d+_\w+|vector_\w+)\.(?:h|hpp)$")
_SPECIALS = frozenset(
    [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    + [
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%smid",
        "%nsmid",
        "%gridid",
        "%clock",
        "%clock64",
        "%clock_hi",
        "WARP_SZ",
    ]
    + [f"%lanemask_{order}" for order in ("eq", "lt", "le", "gt", "ge")]
    + ["%dynamic_smem_size", "%total_smem_size", "%globaltimer"]
)

_Location = tuple[int, int, int]


def parse(text: str) -> Module:
    """All kernels of a PTX module. A function that was not inlined is refused by the instruction that calls it."""
    text = _COMMENT.sub("", text)
    files = {int(number): name for number, name in _FILE.findall(text)}
    entries = list(_ENTRY.finditer(text))
    bodies = [(entry, _closing_brace(text, entry.end())) for entry in entries]
    skipped = [(match.start(), _closing_brace(text, match.end())) for match in _FUNCTION.finditer(text)]
    outside = _outside(text, [(entry.start(), end) for entry, end in bodies] + skipped)
    variables: list[Variable] = []
    dynamic: list[str] = []
    for statement in outside.split(";"):
        variable = _variable(statement.strip())
        if variable is None:
            continue
        if variable.space == "shared" and variable.nbytes == 0:
            dynamic.append(variable.name)
        else:
            variables.append(variable)
    kernels = {}
    for entry, end in bodies:
        kernel = Kernel(entry[1], _params(entry[2] or ""), dynamic_shared=dynamic)
        kernel.variables = [variable for variable in variables if variable.space == "shared"]
        _Body(kernel, files).read(text[entry.end() : end])
        kernels[kernel.name] = kernel
    return Module(kernels, [variable for variable in variables if variable.space in ("global", "const")])


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("PTX: a brace is not closed")


def _outside(text: str, spans: list[tuple[int, int]]) -> str:
    kept, position = [], 0
    for start, end in sorted(spans):
        kept.append(text[position:start])
        position = end + 1
    rest = text[position:]
    kept.append(rest.split(".section", 1)[0])
    # Directives that end with their line, not with a semicolon.
    return re.sub(r"^\s*\.(?:version|target|address_size|file|loc)\b[^\n]*$", "", ";".join(kept), flags=re.M)


def split_commas(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _params(text: str) -> list[Param]:
    params, offset = [], 0
    for declaration in split_commas(text):
        match = re.search(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(.*?)([\w$]+)(?:\[(\d+)\])?$", declaration, re.S)
        if match is None:
            raise ValueError(f"PTX: not a parameter: {declaration}")
        nbytes = width_of(match[2]) // 8 * int(match[5] or 1)
        align = int(match[1] or nbytes)
        offset = -(-offset // align) * align
        params.append(Param(match[4], "bytes" if match[5] else match[2], offset, nbytes))
        offset += nbytes
    return params


def _variable(statement: str) -> Variable | None:
    match = _VARIABLE.match(statement)
    if match is None:
        return None
    element = width_of(match[3]) // 8
    count = 1
    for length in re.findall(r"\[(\d*)\]", match[5]):
        count *= int(length or 0)
    data = None
    if match[6] is not None:
        values = [_integer(value) for value in re.findall(r"[^\s{},]+", match[6])]
        data = b"".join((value % (1 << 8 * element)).to_bytes(element, "little") for value in values)
        data = data.ljust(element * count, b"\0")
    return Variable(match[4], match[1], element * count, int(match[2] or element), data)


def _integer(text: str) -> int:
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


class _Body:
    """Reads the body of one kernel into it."""

    def __init__(self, kernel: Kernel, files: dict[int, str]) -> None:
        self._kernel = kernel
        self._files = files
        self._scopes: list[dict[str, Reg]] = [{}]
        self._line = Line("?", 0)
        self._caller: dict[_Location, _Location] = {}
        self._symbols = {param.name for param in kernel.params}

    def read(self, text: str) -> None:
        position = 0
        while True:
            while position < len(text) and text[position].isspace():
                position += 1
            if position >= len(text):
                return
            if text[position] in "{};":
                self._brace(text[position])
                position += 1
            elif label := _LABEL.match(text, position):
                self._kernel.labels[label[1]] = len(self._kernel.instructions)
                position = label.end()
            elif loc := _LOC.match(text, position):
                self._loc(loc)
                position = loc.end()
            else:
                end = text.index(";", position)
                self._statement(" ".join(text[position:end].split()))
                position = end + 1

    def _brace(self, brace: str) -> None:
        if brace == "{":
            self._scopes.append({})
        elif brace == "}":
            self._scopes.pop()

    def _loc(self, loc: re.Match[str]) -> None:
        here = (int(loc[1]), int(loc[2]), int(loc[3]))
        if loc[4]:
            self._caller[here] = (int(loc[4]), int(loc[5]), int(loc[6]))
        else:
            self._caller.pop(here, None)
        if here[1]:  # line 0 marks code that belongs to no line; it stays with the one before
            self._line = self._line_at(here, 8)

    def _line_at(self, here: _Location, depth: int) -> Line:
        """The innermost line outside CUDA's headers, and up to `depth` lines that led there."""
        file = self._files.get(here[0], "?")
        above = self._caller.get(here)
        if above is None or depth == 0:
            return Line(PurePath(file).name, here[1])
        caller = self._line_at(above, depth - 1)
        return caller if _HEADERS.search(file) else Line(PurePath(file).name, here[1], caller)

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith("."):
            variable = _variable(text)
            if variable is not None:
                self._kernel.variables.append(variable)
            elif not text.startswith((".pragma", ".param")):  # parameters of calls, which are refused later
                raise ValueError(f"PTX: unknown directive: {text}")
        else:
            self._instruction(text)

    def _registers(self, text: str) -> None:
        match = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text)
        assert match is not None, text
        bits = width_of(match[1])
        for name in split_commas(match[2]):
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            names = [f"{many[1]}{number}" for number in range(int(many[2]))] if many else [name]
            for each in names:
                register = Reg(len(self._kernel.registers), bits)
                self._kernel.registers.append(register)
                self._scopes[-1][each] = register

    def _instruction(self, text: str) -> None:
        guard, rest = None, text
        if text.startswith("@"):
            name, rest = text[1:].split(None, 1)
            predicate = self._lookup(name.lstrip("!"))
            assert predicate is not None, text
            guard = Guard(predicate, name.startswith("!"))
        match = re.match(r"[\w.:]+", rest)
        if match is None:
            raise ValueError(f"PTX: not an instruction: {text}")
        opcode = match[0]
        parts = tuple(part.split("::")[0] if part.startswith("shared::") else part for part in opcode.split("."))
        operands = tuple(self._operand(part) for part in split_commas(rest[len(opcode) :]))
        self._kernel.instructions.append(Instruction(text, opcode, parts, operands, guard, self._line))

    def _lookup(self, name: str) -> Reg | None:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _operand(self, text: str) -> Operand:
        if text == "_":
            return None
        if text[0] == "{":
            return Vec(tuple(self._operand(item) for item in split_commas(text[1:-1])))
        if text[0] == "[":
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            operand = self._operand(base)
            assert isinstance(operand, Reg | Sym | Imm), text
            return Mem(operand, int(offset, 0) if offset else 0)
        register = self._lookup(text)
        if register is not None:
            return register
        if text[0] == "!":
            predicate = self._lookup(text[1:].strip())
            assert predicate is not None, text
            return Not(predicate)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first), self._operand(second))
        if text in _SPECIALS:
            return Special(text)
        if text[:2] in ("0f", "0F", "0d", "0D"):
            return Imm(int(text[2:], 16), 32 if text[1] in "fF" else 64)
        if _NUMBER.match(text):
            return Imm(int(text.rstrip("U"), 0))
        return Sym(text)
