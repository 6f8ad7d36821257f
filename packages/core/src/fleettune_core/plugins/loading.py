"""Import one plugin and check it against the contract: what is wrong with it is one record and never a crash."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import pluggy

from fleettune_core import hookspecs
from fleettune_core.errors import did_you_mean, nearest
from fleettune_core.plugins.completeness import incomplete, is_ours
from fleettune_core.plugins.entries import CORE_DISTRIBUTION, PluginEntry, PluginKind
from fleettune_core.plugins.options import check_options
from fleettune_core.plugins.trouble import PluginTroubleError, Trouble, TroubleKind, describe_exception

LAUNCHER_HOOKS = ("detect_environment", "plan_launch", "launch")

_MARK = f"{hookspecs.PROJECT}_impl"


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the contract and no plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def stdout_to_stderr() -> contextlib.AbstractContextManager[Any]:
    """While a plugin's code runs that nobody asked to print: stdout belongs to results, and may be read as JSON."""
    return contextlib.redirect_stdout(sys.stderr)


@cache
def hook_arguments() -> Mapping[str, tuple[str, ...]]:
    """Every hook of the contract, in its order, with the names of its arguments."""
    specs = {
        name: tuple(inspect.signature(function).parameters)
        for name, function in vars(hookspecs).items()
        if hasattr(function, f"{hookspecs.PROJECT}_spec")
    }
    return MappingProxyType(specs)


def hooks_of(kind: PluginKind) -> tuple[str, ...]:
    """The hooks that a plugin of this kind is there for."""
    everything = tuple(hook_arguments())
    if kind is PluginKind.LAUNCHER:
        return LAUNCHER_HOOKS
    if kind is PluginKind.BACKEND:
        return tuple(name for name in everything if name not in LAUNCHER_HOOKS)
    return everything


def load_plugin(entry: PluginEntry) -> Any:
    """Import the entry's object, make it where it is a class, and check it; raises PluginTroubleError.

    One of this project's whose library is not installed is refused here, not by the first rank that imports it.
    """
    if is_ours(entry) and (trouble := incomplete(entry)):
        raise PluginTroubleError(trouble)
    plugin = _import(entry)
    if inspect.isclass(plugin):
        try:
            with stdout_to_stderr():
                plugin = plugin()
        except ModuleNotFoundError as error:
            raise PluginTroubleError(missing_module_trouble(entry, error)) from error
        except (Exception, SystemExit) as error:
            message = f"{entry.value} cannot be called without arguments: {describe_exception(error)}"
            raise PluginTroubleError(entry.trouble(TroubleKind.IMPORT_ERROR, message)) from error
    check_plugin(entry, plugin)
    return plugin


def check_plugin(entry: PluginEntry, plugin: Any) -> None:
    """Register the plugin in a manager that is thrown away, and look at what it implements and at its `Options`.

    Raises PluginTroubleError: wrong-signature, misspelt-hook, wrong-group or options-rejected.
    """
    manager = new_manager()
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        message = _signature_problem(plugin) or " ".join(str(error).splitlines()[1:])
        raise PluginTroubleError(_wrong_signature(entry, message)) from error
    except Exception as error:
        message = f"it cannot be registered: {describe_exception(error)}"
        raise PluginTroubleError(entry.trouble(TroubleKind.IMPORT_ERROR, message)) from error
    # What pluggy lets pass would not fail, but call the hook with less than the contract says.
    if problem := _signature_problem(plugin):
        raise PluginTroubleError(_wrong_signature(entry, problem))

    callers = manager.get_hookcallers(plugin) or []
    misspelt = [
        caller.name
        for caller in callers
        if not caller.has_spec() and not all(hook.optionalhook for hook in caller.get_hookimpls())
    ]
    if misspelt:
        raise PluginTroubleError(_misspelt(entry, misspelt))
    implemented = [caller.name for caller in callers if caller.has_spec()]
    if not set(implemented) & set(hooks_of(entry.kind)):
        raise PluginTroubleError(_wrong_group(entry, plugin, implemented))
    if problem := check_options(plugin, entry.kind):
        hint = "declare a frozen dataclass whose fields are all made with fleettune_core.config.setting"
        raise PluginTroubleError(entry.trouble(TroubleKind.OPTIONS_REJECTED, problem, hint))


def missing_module_trouble(entry: PluginEntry, error: ModuleNotFoundError) -> Trouble:
    """The record for a module that is not installed: missing-extra where an extra of the plugin's distribution, or of
    core, would install it, else import-error."""
    missing = error.name or ""
    for distribution in dict.fromkeys((entry.distribution, CORE_DISTRIBUTION)):
        extra = _extra_that_installs(distribution, missing)
        if extra is not None:
            return entry.trouble(
                TroubleKind.MISSING_EXTRA,
                f"it needs the module {missing}, which is not installed",
                f"pip install '{distribution}[{extra}]'",
            )
    message = f"{entry.value} cannot be imported: {describe_exception(error)}"
    hint = f"install what provides the module {missing}" if missing else None
    return entry.trouble(TroubleKind.IMPORT_ERROR, message, hint)


def _import(entry: PluginEntry) -> Any:
    point = importlib.metadata.EntryPoint(name=entry.name, value=entry.value, group=entry.kind.value)
    try:
        with stdout_to_stderr():
            return point.load()
    except ModuleNotFoundError as error:
        raise PluginTroubleError(missing_module_trouble(entry, error)) from error
    # A module that calls sys.exit() while it is imported must not end the run with its own idea of success.
    except (Exception, SystemExit) as error:
        message = f"{entry.value} cannot be imported: {describe_exception(error)}"
        raise PluginTroubleError(entry.trouble(TroubleKind.IMPORT_ERROR, message)) from error


def _extra_that_installs(distribution: str, module: str) -> str | None:
    """The extra whose requirements name the module's distribution; the smallest one where several do.

    Which distribution brings a module that is not installed stands nowhere, so the usual spellings are tried.
    """
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    parts = re.sub(r"[-_]+", "-", module.lower()).split(".")
    prefixes = ["-".join(parts[:end]) for end in range(1, len(parts) + 1)]
    wanted = {form for name in prefixes for form in (name, f"py{name}", f"python-{name}", f"{name}-python")}
    by_extra: dict[str, set[str]] = {}
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", requirement)
        if name and extra:
            by_extra.setdefault(extra[1], set()).add(re.sub(r"[-_.]+", "-", name[0]).lower())
    fitting = [extra for extra, names in by_extra.items() if names & wanted]
    return min(fitting, key=lambda extra: len(by_extra[extra]), default=None)


def _marked_hooks(plugin: Any) -> list[tuple[str, Callable[..., Any]]]:
    """(hook, function) for everything that carries our hookimpl mark."""
    found: list[tuple[str, Callable[..., Any]]] = []
    for name in dir(plugin):
        # Nothing but functions and methods is touched: a property may do anything when it is read.
        static = inspect.getattr_static(plugin, name, None)
        if not isinstance(static, (FunctionType, MethodType, staticmethod, classmethod)):
            continue
        function = getattr(plugin, name)
        options: Any = getattr(function, _MARK, None)
        if options is not None:
            found.append((options["specname"] or name, function))
    return found


def _signature_problem(plugin: Any) -> str | None:
    """The first hook that would not get the contract's arguments, in a sentence; None when all would."""
    specs = hook_arguments()
    for hook, function in _marked_hooks(plugin):
        if hook not in specs:
            continue
        contract = f"{hook}({', '.join(specs[hook])})"
        bound = getattr(function, "__func__", None)
        if bound is not None and inspect.ismethod(function):
            first = next(iter(inspect.signature(bound).parameters), None)
            if first in specs[hook]:
                return f"{hook} lacks self before {first}; the contract is {contract}"
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            required = parameter.default is parameter.empty
            if parameter.name not in specs[hook]:
                if required:
                    close = did_you_mean(parameter.name, specs[hook])
                    return f"{hook} takes {parameter.name!r}, which is not in the contract {contract}{close}"
            elif parameter.kind is parameter.KEYWORD_ONLY:
                return f"{hook} takes {parameter.name!r} by keyword only and would not get it; write {contract}"
            elif not required:
                return f"{hook} gives {parameter.name!r} a default and would not get its value; write {contract}"
    return None


def _wrong_signature(entry: PluginEntry, message: str) -> Trouble:
    return entry.trouble(TroubleKind.WRONG_SIGNATURE, message, "take the signature from fleettune_core/hookspecs.py")


def _misspelt(entry: PluginEntry, names: list[str]) -> Trouble:
    hooks = tuple(hook_arguments())
    told = ", ".join(f"{name}{did_you_mean(name, hooks)}" for name in sorted(names))
    close = nearest(min(names), hooks)
    hint = (
        f"call it {close[0]}" if close and len(names) == 1 else "mark hooks of another version with optionalhook=True"
    )
    return entry.trouble(TroubleKind.MISSPELT_HOOK, f"there is no hook {told}", hint)


def _wrong_group(entry: PluginEntry, plugin: Any, implemented: list[str]) -> Trouble:
    own = hooks_of(entry.kind)
    if implemented:
        better = PluginKind.BACKEND if entry.kind is PluginKind.LAUNCHER else PluginKind.LAUNCHER
        message = f"it is in {entry.kind.value}, but implements {', '.join(sorted(implemented))} alone"
        return entry.trouble(TroubleKind.WRONG_GROUP, message, f"declare it in the group {better.value}")
    unmarked = [name for name in own if callable(getattr(plugin, name, None))]
    message = f"it is in {entry.kind.value}, but implements no hook of a {entry.kind.label}"
    hint = f"mark {', '.join(unmarked)} with @fleettune_core.hookspecs.hookimpl" if unmarked else None
    return entry.trouble(TroubleKind.WRONG_GROUP, message, hint or f"implement at least one of {', '.join(own)}")
