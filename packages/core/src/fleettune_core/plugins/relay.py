"""This run's hook calls: a plugin manager of its own with the chosen launcher, the chosen backend and the extensions.

The launcher is registered first, then the backend, then the extensions by name; pluggy calls the last one first. A
hook with one result has one owner: an extension that wants to answer such a hook of the chosen launcher or backend is
left out with a record. It may wrap it (`hookimpl(wrapper=True)`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

import pluggy

from fleettune_core.config.source import Source
from fleettune_core.errors import FtError
from fleettune_core.plugins.catalog import Catalog, load_catalog
from fleettune_core.plugins.entries import PluginEntry, PluginKind
from fleettune_core.plugins.loading import check_plugin, missing_module_trouble, new_manager
from fleettune_core.plugins.options import build_options
from fleettune_core.plugins.trouble import PluginTroubleError, Trouble, TroubleKind, describe_exception
from fleettune_core.types import Job, LaunchPlan, WrapFacts, WrappedModel

NEEDS_ANSWER = frozenset({"plan_launch", "launch", "expect_wrapped", "wrap_model", "reduce_grads"})
"""Hooks for which core has nothing to fall back on."""

ANSWERS: Mapping[str, type] = MappingProxyType(
    {"plan_launch": LaunchPlan, "launch": Job, "expect_wrapped": WrapFacts, "wrap_model": WrappedModel}
)
"""Hooks whose answer is held to its type before core works with it."""

_RUN_FILE = Source(kind="file", where="run.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlugin:
    """A plugin's object, with the entry that says what it is called and where it comes from."""

    entry: PluginEntry
    plugin: Any


class Relay:
    """Calls hooks, and says whose fault it is when one fails.

    `hook` is pluggy's own relay, for calls on a hot path (`relay.hook.reduce_grads(...)`): nothing is added to them,
    and their errors come as they are.
    """

    def __init__(self, plugins: Iterable[LoadedPlugin], troubles: Iterable[Trouble] = ()) -> None:
        """Check and register plugins, in order. Raises PluginTroubleError when a launcher or backend does not fit."""
        self._manager = new_manager()
        self._plugins: dict[int, LoadedPlugin] = {}
        self._troubles = list(troubles)
        self.hook: Any = self._manager.hook
        for loaded in plugins:
            try:
                self._register(loaded)
            except PluginTroubleError as error:
                if loaded.entry.kind is not PluginKind.EXTENSION:
                    raise
                self._troubles.append(error.trouble)
        self._manager.check_pending()

    @classmethod
    def for_worker(cls, backend: str, catalog: Catalog | None = None) -> Relay:
        """The relay of a worker: the planned backend and the extensions.

        Raises FtError (exit code 3) when the backend is broken, or not installed where the worker runs.
        """
        catalog = catalog or load_catalog()
        return open_relay(catalog, backend=catalog.find(PluginKind.BACKEND, backend))

    @property
    def troubles(self) -> tuple[Trouble, ...]:
        """Extensions that were left out, and why."""
        return tuple(self._troubles)

    @property
    def plugins(self) -> tuple[PluginEntry, ...]:
        """What is registered, in order."""
        return tuple(loaded.entry for loaded in self._plugins.values())

    def has(self, hook_name: str) -> bool:
        """Whether a registered plugin answers this hook."""
        return bool(self._answering(hook_name))

    def owner(self, hook_name: str) -> PluginEntry | None:
        """The plugin that answers this hook first, or None."""
        answering = self._answering(hook_name)
        return self._plugins[id(answering[-1].plugin)].entry if answering else None

    def call(self, hook_name: str, **arguments: Any) -> Any:
        """Call a hook: the owner's result (None where nobody answers), or a list, last plugin first, of all answers.

        An FtError passes unchanged. Anything else that a hook raises becomes PluginTroubleError (exit code 3), which
        names plugin, distribution and hook and has the original as its cause; so does no answer where core has
        nothing to fall back on, and an answer that is not of the contract's type.
        """
        caller = getattr(self.hook, hook_name)
        try:
            result = caller(**arguments)
        except (FtError, pluggy.HookCallError):
            raise
        # A hook that calls sys.exit() must not end the run with its own idea of success.
        except (Exception, SystemExit) as error:
            raise PluginTroubleError(self._blame(hook_name, error)) from error
        if result is None and hook_name in NEEDS_ANSWER:
            raise PluginTroubleError(self._no_answer(hook_name))
        if hook_name in ANSWERS and not isinstance(result, ANSWERS[hook_name]):
            raise PluginTroubleError(self._wrong_answer(hook_name, result))
        return result

    def options_of(self, name: str, values: Mapping[str, Any]) -> Any:
        """The `Options` of the registered plugin `name`, with the run's `values` in it; None where it has none.

        Raises FtError as `build_options` does: control has checked them, but another version may be installed here.
        """
        loaded = next(loaded for loaded in self._plugins.values() if loaded.entry.name == name)
        entry = loaded.entry
        return build_options(loaded.plugin, values, lambda _: _RUN_FILE, title=entry.title, kind=entry.kind)

    def _register(self, loaded: LoadedPlugin) -> None:
        entry, plugin = loaded.entry, loaded.plugin
        if id(plugin) in self._plugins:
            return  # One object under two groups: it answers once.
        check_plugin(entry, plugin)
        self._manager.register(plugin, name=f"{entry.kind.label}:{entry.name}")
        for caller in self._manager.get_hookcallers(plugin) or []:
            answering = self._answering(caller.name)
            single = caller.spec is not None and caller.spec.opts["firstresult"]
            if not single or len(answering) < 2 or all(hook.plugin is not plugin for hook in answering):
                continue
            rival = next(self._plugins[id(hook.plugin)].entry for hook in answering if hook.plugin is not plugin)
            self._manager.unregister(plugin)
            raise PluginTroubleError(
                entry.trouble(
                    TroubleKind.DUPLICATE_NAME,
                    f"the hook {caller.name} has one owner, and that is {rival.title} ({rival.source})",
                    "wrap the hook instead: hookimpl(wrapper=True)" if entry.kind is PluginKind.EXTENSION else None,
                )
            )
        self._plugins[id(plugin)] = loaded

    def _answering(self, hook_name: str) -> list[Any]:
        """Implementations that can give a result: wrappers only stand around one."""
        implementations: list[Any] = getattr(self.hook, hook_name).get_hookimpls()
        return [hook for hook in implementations if not (hook.wrapper or hook.hookwrapper)]

    def _blame(self, hook_name: str, error: BaseException) -> Trouble:
        entry = self._plugins[id(self._raised_by(hook_name, error).plugin)].entry
        if isinstance(error, ModuleNotFoundError):
            trouble = missing_module_trouble(entry, error)
            if trouble.kind is TroubleKind.MISSING_EXTRA:
                return trouble
        return entry.trouble(
            TroubleKind.HOOK_RAISES,
            f"its hook {hook_name} raised {describe_exception(error)}",
            f"this is a fault of {entry.source}: report it to its author",
        )

    def _raised_by(self, hook_name: str, error: BaseException) -> Any:
        """The implementation whose code stands first in the traceback."""
        implementations: list[Any] = getattr(self.hook, hook_name).get_hookimpls()
        by_code: Mapping[CodeType, Any] = {
            code: hook for hook in implementations if (code := getattr(hook.function, "__code__", None)) is not None
        }
        place = error.__traceback__
        while place is not None:
            if place.tb_frame.f_code in by_code:
                return by_code[place.tb_frame.f_code]
            place = place.tb_next
        # Code without a frame (a compiled function): the one that is called first.
        return implementations[-1]

    def _wrong_answer(self, hook_name: str, result: Any) -> Trouble:
        entry = self.owner(hook_name)
        assert entry is not None, "an answer has an owner"
        return entry.trouble(
            TroubleKind.HOOK_RAISES,
            f"its hook {hook_name} answered a {type(result).__name__}, which is no {ANSWERS[hook_name].__name__}",
            f"this is a fault of {entry.source}: report it to its author",
        )

    def _no_answer(self, hook_name: str) -> Trouble:
        entry = self.owner(hook_name)
        if entry is not None:
            return entry.trouble(TroubleKind.HOOK_RAISES, f"its hook {hook_name} answered None")
        chosen = [entry for entry in self.plugins if entry.kind is not PluginKind.EXTENSION]
        return Trouble(
            kind=TroubleKind.HOOK_RAISES,
            plugin=" and ".join(entry.title for entry in chosen) or "no plugin",
            distribution=" and ".join(entry.source for entry in chosen) or "nothing chosen",
            message=f"the hook {hook_name} is not implemented",
        )


def open_relay(catalog: Catalog, *, launcher: PluginEntry | None = None, backend: PluginEntry | None = None) -> Relay:
    """The relay of a run: the chosen plugins and every installed extension.

    Raises PluginTroubleError (exit code 3) when a chosen plugin is broken. A broken extension, which nobody named, is
    one record in `Relay.troubles`.
    """
    plugins = [LoadedPlugin(entry=entry, plugin=catalog.load(entry)) for entry in (launcher, backend) if entry]
    troubles: list[Trouble] = []
    extensions = catalog.entries(PluginKind.EXTENSION)
    names = [entry.name for entry in extensions]
    for entry in extensions:
        if names.count(entry.name) > 1:
            continue  # The catalog already holds the record of the clash.
        try:
            plugins.append(LoadedPlugin(entry=entry, plugin=catalog.load(entry)))
        except PluginTroubleError as error:
            troubles.append(error.trouble)
    return Relay(plugins, troubles)
