"""``Group``: the ranks a module is split over, whatever the caller had in hand.

A ``DeviceMesh`` (1-D), a ``ProcessGroup``, or None for all ranks. State belongs to the group;
nothing here is global to the process.
"""

from __future__ import annotations

from typing import Any, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.errors import ConfigError

GroupLike = Union["Group", DeviceMesh, dist.ProcessGroup, None]


class Group:
    """Ranks that share one split.

    Attributes:
        process_group: the ``ProcessGroup``, or None for a group of one.
        mesh: the 1-D ``DeviceMesh`` the group came from, or None.
        size: number of ranks.
        rank: this process's number within the group.
        mesh_dim: name of the mesh dimension (``"tp"`` when it has none).
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, mesh_dim: str
    ) -> None:
        self.process_group = process_group
        self.mesh_dim = mesh_dim
        self._mesh = mesh
        self.size = process_group.size() if process_group is not None else 1
        self.rank = process_group.rank() if process_group is not None else 0
        if self.size == 1:
            self.process_group = None

    @property
    def name(self) -> str:
        """The name by which ops find the group; ``""`` is the group of one."""
        return self.process_group.group_name if self.process_group is not None else ""

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, in group order."""
        if self.process_group is None:
            return [dist.get_rank() if dist.is_initialized() else 0]
        return dist.get_process_group_ranks(self.process_group)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The group as a 1-D ``DeviceMesh`` (made from the process group when it came bare)."""
        if self._mesh is None:
            assert self.process_group is not None
            self._mesh = DeviceMesh.from_group(
                self.process_group, device_type, mesh_dim_names=(self.mesh_dim,)
            )
        return self._mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copied module keeps talking to the same ranks

    def __repr__(self) -> str:
        return f"Group({self.mesh_dim}, rank {self.rank} of {self.size}, global ranks {self.ranks})"


def resolve_group(group: GroupLike) -> Group:
    """A :class:`Group` from a 1-D ``DeviceMesh``, a ``ProcessGroup``, a ``Group`` or None.

    None means all ranks of the initialised default group, or a group of one without it.

    Raises:
        ConfigError: a mesh of several dimensions, a rank that is not a member, another type.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return Group(None, None, "tp")
        return Group(dist.group.WORLD, None, "tp")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise ConfigError(
                f"mesh has {group.ndim} dimensions {tuple(names)}; a split needs one. "
                f"Fix: pass one of them, for example mesh[{(names or ('tp',))[-1]!r}]"
            )
        name = group.mesh_dim_names[0] if group.mesh_dim_names else "tp"
        return Group(group.get_group(), group, name)
    if isinstance(group, dist.ProcessGroup):
        if group.rank() < 0:
            raise ConfigError("this rank is not a member of the given ProcessGroup")
        return Group(group, None, "tp")
    if isinstance(group, object) and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("this rank is not a member of the given ProcessGroup")
    raise ConfigError(
        f"mesh or group must be a DeviceMesh, a ProcessGroup or None, got {type(group).__name__}"
    )


def group_by_name(name: str) -> dist.ProcessGroup | None:
    """The process group that ops mean by ``name``; None for ``""``, the group of one."""
    if not name:
        return None
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
