#include "runtime/peer_groups.h"

#include <mutex>
#include <unordered_map>

namespace tpkernels {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<PeerGroup>> groups;
};

Registry& registry() {
  static Registry* const instance = new Registry;  // not destroyed at exit: ops may still run
  return *instance;
}

}  // namespace

void register_peer_group(const std::string& name, const std::shared_ptr<PeerGroup>& group) {
  std::lock_guard lock(registry().mutex);
  registry().groups[name] = group;
}

void forget_peer_group(const std::string& name, const PeerGroup* group) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(name);
  if (found == registry().groups.end()) return;
  const std::shared_ptr<PeerGroup> held = found->second.lock();
  if (held == nullptr || held.get() == group) registry().groups.erase(found);
}

std::shared_ptr<PeerGroup> find_peer_group(const std::string& name) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().groups.find(name);
  return found == registry().groups.end() ? nullptr : found->second.lock();
}

}  // namespace tpkernels
