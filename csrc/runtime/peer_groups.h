// The peer groups of this process by name: how ops, which are given a group's name, find them.
#pragma once

#include <memory>
#include <string>

#include "runtime/peer_group.h"

namespace tpkernels {

// From now on `name` means `group`; a later one of the same name takes its place.
void register_peer_group(const std::string& name, const std::shared_ptr<PeerGroup>& group);
// Forgets `name` if it still means `group`.
void forget_peer_group(const std::string& name, const PeerGroup* group);
// The group, or null.
std::shared_ptr<PeerGroup> find_peer_group(const std::string& name);

}  // namespace tpkernels
