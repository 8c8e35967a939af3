"""Registries of replaceable parts: a protocol for each kind, and parts by name.

A part is registered by code,

    @PLACEMENT_RULES.register("mine")
    def mine(load, cluster, min_replicas): ...

or by the entry points of an installed package, in its pyproject.toml, which are loaded at first use:

    [project.entry-points."moe_lightning.placement"]
    mine = "my_package.rules:mine"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from typing_extensions import get_protocol_members

from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import suggestion

T = TypeVar("T", bound=Callable[..., Any])


class Registry(Generic[T]):
    """The parts of one kind by name.

    Args:
        kind: what they are, for messages; behind `moe_lightning.` the group of their entry points.
        protocol: of the parts: all are called with the arguments of its `__call__`.
        members: those of this package, whose names cannot be given again.
        makes: protocol of what the parts return, where that is an object of theirs.
    """

    def __init__(self, kind: str, protocol: Any, members: Mapping[str, T], *, makes: Any = None) -> None:
        self.kind = kind
        self._parameters = list(inspect.signature(protocol.__call__).parameters.values())[1:]
        self._makes = makes
        self._own = tuple(members)
        self._members = dict(members)

    def __iter__(self) -> Iterator[str]:
        """This package's names."""
        return iter(self._own)

    def __getitem__(self, name: str) -> T:
        return self.find(name)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: the part has this name from now on, in this process.

        Raises:
            ConfigurationError: the name is one of this package's, or the part does not fit the protocol.
        """
        if name in self._own:
            raise ConfigurationError(f"the {self.kind} {name!r} comes with moe_lightning: use another name for yours")

        def keep(part: T) -> T:
            self._members[name] = self._fitting(part, f"the {self.kind} {name!r}")
            return part

        return keep

    def find(self, name: str, key: str | None = None) -> T:
        """The part of a name.

        Args:
            key: where the name stands in a configuration, for messages.

        Raises:
            ConfigurationError: no part has this name, several have it, it cannot be imported, or it does not fit the
                protocol.
        """
        if name not in self._members:
            self._members[name] = self._plugin(name, f"{key or self.kind}={shown(name)}")
        return self._members[name]

    def make(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the part of a name with these arguments and check what it returns.

        Raises:
            ConfigurationError: as `find`, or the returned object lacks what its protocol asks for.
        """
        made = self.find(name)(*args, **kwargs)
        missing = sorted(get_protocol_members(self._makes) - {*dir(made)})
        if missing:
            raise ConfigurationError(
                f"the {self.kind} {name!r} makes a {type(made).__name__}, which lacks {', '.join(missing)}: "
                f"give it all that {self._makes.__name__} names"
            )
        return made

    def _plugin(self, name: str, what: str) -> T:
        from importlib.metadata import entry_points  # takes a while, and few runs have plugins

        entries = set(entry_points(group=f"moe_lightning.{self.kind}"))
        chosen = sorted((entry for entry in entries if entry.name == name), key=lambda entry: entry.value)
        if not chosen:
            names = [*self._members, *sorted({entry.name for entry in entries} - self._members.keys())]
            near = suggestion(name, names)
            raise ConfigurationError(f"{what} is not a known {self.kind}{near}: use one of {', '.join(names)}")
        if len(chosen) > 1:
            values = " and ".join(entry.value for entry in chosen)
            raise ConfigurationError(f"{what} means {values}: uninstall all packages that bring it but one")
        try:
            part = chosen[0].load()
        except Exception as error:  # whatever a stranger's module raises
            raise ConfigurationError(
                f"{what} cannot be imported from {chosen[0].value} ({type(error).__name__}: {error}): "
                "mend the package that brings it"
            ) from error
        return self._fitting(part, f"{what}, {chosen[0].value},")

    def _fitting(self, part: Any, what: str) -> T:
        """The part, if it can be called as the protocol says."""
        named = {p.name: None for p in self._parameters if p.kind is p.KEYWORD_ONLY}
        order = ", ".join(p.name if p.name not in named else f"{p.name}=" for p in self._parameters)
        if not callable(part):
            raise ConfigurationError(f"{what} cannot be called: it must take ({order})")
        try:
            inspect.signature(part).bind(*[None] * (len(self._parameters) - len(named)), **named)
        except TypeError as error:
            raise ConfigurationError(f"{what} has other arguments ({error}): it must take ({order})") from error
        return part  # type: ignore[no-any-return]
