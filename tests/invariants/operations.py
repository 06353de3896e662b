"""The operations of a trace, a module for each family of them in :mod:`.rules`.

To add one: what it means goes into :mod:`.reference`, a rule of its family draws its arguments and hands both sides to
:meth:`Machine.act`; and if it shows anything new, :meth:`Machine.look` and :meth:`Machine.to_be_shown` tell it.
"""
from __future__ import annotations

from .rules.anew import Anew
from .rules.asking import Asking
from .rules.decoding import Decoding
from .rules.refusals import Refusals
from .rules.saving import Saving
from .rules.settings import Settings
from .rules.tree import Tree


class Traces(Tree, Decoding, Settings, Asking, Anew, Saving, Refusals):
    """All of them."""
