"""Read pickles of a few known classes without Python's unpickler, which calls and changes whatever a file names.

:func:`unpickled` interprets the opcodes that torch's metadata need. A file can make plain containers, call the given
functions, and make instances of the given classes. State is set on such an instance alone, once, and only its fields.
Nothing outside of the result changes, and nothing larger than the file is allocated.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from reprlib import repr as short
from typing import Any

__all__ = ["Known", "unpickled"]

NEWEST = 5  # protocol
INT_BYTES = 8  # of a number; metadata hold sizes and positions of 64 bits

Name = tuple[str, str]  # module and name


class Known:
    """Names that a file may use.

    Args:
        classes: dataclasses of which a file may make instances.
        functions: what a file may call; each checks its arguments.
        states: for classes with a state of another form than a dict of fields: returns the fields of a state.
        constant: returns the constant of a module's name; None if there is none.
    """

    def __init__(
        self,
        classes: Mapping[Name, type],
        functions: Mapping[Name, Callable[..., Any]],
        states: Mapping[type, Callable[[Any], Mapping[str, Any]]],
        constant: Callable[[str, str], Any],
    ) -> None:
        self.classes, self.functions, self.constant = classes, functions, constant
        self._states = states
        self._fields = {cls: {field.name for field in fields(cls)} for cls in classes.values()}
        # Instances of these can be keys: their fields are checked before they are hashed.
        self.keys = (str, int, *(cls for cls in classes.values() if cls.__hash__ not in (None, object.__hash__)))

    def fields_of(self, cls: type, state: Any) -> Mapping[str, Any]:
        """Return the fields that ``state`` sets on an instance of ``cls``.

        Raises:
            UnpicklingError: the class has no such fields.
        """
        found: Any = self._states[cls](state) if cls in self._states else state
        if type(found) is not dict:
            raise pickle.UnpicklingError(f"the state of a {cls.__name__} is {short(found)}")
        if not found.keys() <= self._fields[cls]:
            other = next(name for name in found if name not in self._fields[cls])
            raise pickle.UnpicklingError(f"it sets {short(other)} of a {cls.__name__}, which has no such field")
        return found


class _Name:
    """A class or function that a file names, before it is used. It is never the real one."""

    __slots__ = ("name",)

    def __init__(self, name: Name) -> None:
        self.name = name


def unpickled(data: bytes, known: Known) -> Any:
    """Return the object that a pickle holds.

    Args:
        data: the whole pickle, of protocol 2 or later.
        known: the names that it may use.

    Raises:
        UnpicklingError: it is damaged, names something else, or does something else than to make objects.
    """
    return _Machine(data, known).run()


class _Machine:
    def __init__(self, data: bytes, known: Known) -> None:
        self._data, self._known = data, known
        self._at = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []  # stacks below each mark
        self._memo: dict[int, Any] = {}
        self._blank: dict[int, Any] = {}  # instances without a state yet, by id; the memo or stack may drop them

    def run(self) -> Any:
        do, data = {code[0]: getattr(self, f"_{name}") for code, name in OPCODES.items()}, self._data
        while self._at < len(data):
            code = data[self._at]
            self._at += 1
            if code == pickle.STOP[0]:
                return self._end()
            step = do.get(code)
            if step is None:
                raise pickle.UnpicklingError(f"it has an instruction {bytes([code])!r}, which metadata never have")
            step()
        raise pickle.UnpicklingError("it ends too early")

    def _end(self) -> Any:
        if self._marked or len(self._stack) != 1:
            raise pickle.UnpicklingError("it ends within an object")
        if self._at != len(self._data):
            raise pickle.UnpicklingError(f"{len(self._data) - self._at:,} more bytes follow its end")
        return self._stack[0]

    # -- bytes

    def _take(self, count: int) -> bytes:
        at, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise pickle.UnpicklingError("it ends too early")
        return self._data[at : self._at]

    def _byte(self) -> int:
        at, self._at = self._at, self._at + 1
        if at >= len(self._data):
            raise pickle.UnpicklingError("it ends too early")
        return self._data[at]

    def _number(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise pickle.UnpicklingError("it ends too early")
        return self._take(end + 1 - self._at)[:-1].decode()

    def _pop(self) -> Any:
        if not self._stack:
            raise pickle.UnpicklingError("it takes an object that is not there")
        return self._stack.pop()

    def _top(self) -> Any:
        if not self._stack:
            raise pickle.UnpicklingError("it uses an object that is not there")
        return self._stack[-1]

    def _above_mark(self) -> list[Any]:
        if not self._marked:
            raise pickle.UnpicklingError("it takes objects that are not there")
        found, self._stack = self._stack, self._marked.pop()
        return found

    # -- frames, marks and the memo

    def _proto(self) -> None:
        if (version := self._byte()) > NEWEST:
            raise pickle.UnpicklingError(f"it is of protocol {version}")

    def _frame(self) -> None:
        if self._number(8) > len(self._data) - self._at:
            raise pickle.UnpicklingError("it ends too early")

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def _put(self) -> None:
        self._memo[self._byte()] = self._top()

    def _long_put(self) -> None:
        self._memo[self._number(4)] = self._top()

    def _get(self) -> None:
        self._remember(self._byte())

    def _long_get(self) -> None:
        self._remember(self._number(4))

    def _remember(self, index: int) -> None:
        if index not in self._memo:
            raise pickle.UnpicklingError(f"it remembers an object {index} that is not there")
        self._stack.append(self._memo[index])

    # -- plain values

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int1(self) -> None:
        self._stack.append(self._byte())

    def _int2(self) -> None:
        self._stack.append(self._number(2))

    def _int4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _long(self) -> None:
        count = self._byte()
        if count > INT_BYTES:
            raise pickle.UnpicklingError("it holds a number of more than 64 bits")
        self._stack.append(int.from_bytes(self._take(count), "little", signed=True))

    def _text1(self) -> None:
        self._text(1)

    def _text4(self) -> None:
        self._text(4)

    def _text8(self) -> None:
        self._text(8)

    def _text(self, width: int) -> None:
        count = self._byte() if width == 1 else self._number(width)
        self._stack.append(self._take(count).decode("utf-8", "surrogatepass"))

    # -- containers

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple(self) -> None:
        found = tuple(self._above_mark())
        self._stack.append(found)

    def _tuple1(self) -> None:
        self._stack.append((self._pop(),))

    def _tuple2(self) -> None:
        two, one = self._pop(), self._pop()
        self._stack.append((one, two))

    def _tuple3(self) -> None:
        three, two, one = self._pop(), self._pop(), self._pop()
        self._stack.append((one, two, three))

    def _empty_list(self) -> None:
        self._stack.append([])

    def _append(self) -> None:
        value = self._pop()
        self._list().append(value)

    def _appends(self) -> None:
        values = self._above_mark()
        self._list().extend(values)

    def _list(self) -> list[Any]:
        found = self._top()
        if type(found) is not list:
            raise pickle.UnpicklingError(f"it appends to a {type(found).__name__}")
        return found

    def _empty_dict(self) -> None:
        self._stack.append({})

    def _set(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_all([key, value])

    def _sets(self) -> None:
        self._set_all(self._above_mark())

    def _set_all(self, items: list[Any]) -> None:
        found = self._top()
        if not isinstance(found, dict) or len(items) % 2:
            raise pickle.UnpicklingError(f"it sets entries of a {type(found).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in self._known.keys or id(key) in self._blank:
                raise pickle.UnpicklingError(f"a {type(key).__name__} is a key")
            if key in found:
                raise pickle.UnpicklingError(f"the key {short(key)} is there twice")
            found[key] = value

    # -- names, and what is made of them

    def _global(self) -> None:
        module = self._line()
        self._look_up(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise pickle.UnpicklingError("a name is no text")
        self._look_up(module, name)

    def _look_up(self, module: str, name: str) -> None:
        constant = self._known.constant(module, name)
        if constant is not None:
            self._stack.append(constant)
            return
        if (module, name) not in self._known.classes and (module, name) not in self._known.functions:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}")
        self._stack.append(_Name((module, name)))

    def _reduce(self) -> None:
        arguments, callee = self._pop(), self._pop()
        function = self._known.functions.get(callee.name) if type(callee) is _Name else None
        if function is None or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"it calls a {type(callee).__name__}")
        self._stack.append(function(*arguments))

    def _new(self) -> None:
        arguments, callee = self._pop(), self._pop()
        cls = self._known.classes.get(callee.name) if type(callee) is _Name else None
        if cls is None or arguments != ():
            raise pickle.UnpicklingError(f"it makes an object of a {type(callee).__name__}")
        made: Any = object.__new__(cls)
        self._blank[id(made)] = made
        self._stack.append(made)

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if self._blank.pop(id(target), None) is None:
            raise pickle.UnpicklingError(f"it changes a {type(target).__name__}")
        vars(target).update(self._known.fields_of(type(target), state))


OPCODES = {
    pickle.PROTO: "proto",
    pickle.FRAME: "frame",
    pickle.MARK: "mark",
    pickle.MEMOIZE: "memoize",
    pickle.BINPUT: "put",
    pickle.LONG_BINPUT: "long_put",
    pickle.BINGET: "get",
    pickle.LONG_BINGET: "long_get",
    pickle.NONE: "none",
    pickle.NEWTRUE: "true",
    pickle.NEWFALSE: "false",
    pickle.BININT1: "int1",
    pickle.BININT2: "int2",
    pickle.BININT: "int4",
    pickle.LONG1: "long",
    pickle.SHORT_BINUNICODE: "text1",
    pickle.BINUNICODE: "text4",
    pickle.BINUNICODE8: "text8",
    pickle.EMPTY_TUPLE: "empty_tuple",
    pickle.TUPLE: "tuple",
    pickle.TUPLE1: "tuple1",
    pickle.TUPLE2: "tuple2",
    pickle.TUPLE3: "tuple3",
    pickle.EMPTY_LIST: "empty_list",
    pickle.APPEND: "append",
    pickle.APPENDS: "appends",
    pickle.EMPTY_DICT: "empty_dict",
    pickle.SETITEM: "set",
    pickle.SETITEMS: "sets",
    pickle.GLOBAL: "global",
    pickle.STACK_GLOBAL: "stack_global",
    pickle.REDUCE: "reduce",
    pickle.NEWOBJ: "new",
    pickle.BUILD: "build",
}
