"""The completion of the command line in bash and zsh, made from the options."""

from __future__ import annotations

from collections.abc import Mapping

from jaxkv.tools import COMMANDS, SUBCOMMANDS
from jaxkv.tools.usage import Usage

# `case` chooses by the words before the one to complete. File names complete elsewhere.
_SCRIPT = """\
# Completion of jaxkv in bash and zsh. Save this where your shell looks for it, such as
# ~/.local/share/bash-completion/completions/jaxkv, or source it.
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_jaxkv() {
  local words= cur="${COMP_WORDS[COMP_CWORD]}"
  case "${COMP_WORDS[*]:1:COMP_CWORD-1}" in
%s
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _jaxkv jaxkv"""


def completion_script(usages: Mapping[str, Usage]) -> str:
    rows = [f"'') words='{' '.join(COMMANDS)} help --help --version' ;;"]
    for word, names in SUBCOMMANDS.items():
        rows.append(f"{word}) words='{' '.join(names)} --help' ;;")
    for command, usage in usages.items():
        for option in usage.options.values():
            if option.choices:
                words = " ".join(option.choices)
                rows.append(f"'{command} '*{option.name}) words='{words}' ;;")
        words = " ".join([*usage.options, "--help"])
        rows.append(f"'{command}'*) [[ $cur == -* ]] && words='{words}' ;;")
    return _SCRIPT % "\n".join(f"    {row}" for row in rows)
