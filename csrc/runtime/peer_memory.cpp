#include "runtime/peer_memory.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>

namespace tpkernels {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kFirstReserve = size_t{64} << 10;  // doubled from there

size_t up_to_page(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

size_t control_bytes() { return up_to_page(sizeof(ControlBlock)); }
size_t abort_bytes() { return up_to_page(sizeof(AbortRecord)); }
size_t slots_offset(int world) { return abort_bytes() + world * control_bytes(); }

[[noreturn]] void fail(const std::string& what, const std::string& fix) {
  const int error = errno;
  throw PeerError("shared memory: " + what + ": " + std::strerror(error) + ". Fix: " + fix);
}

std::byte* map(size_t bytes, int flags, int descriptor) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) {
    fail("cannot map " + std::to_string(bytes) + " bytes of addresses",
         "raise the limit of addresses (ulimit -v), or use the gloo backend");
  }
  return static_cast<std::byte*>(base);
}

// One byte of the file is locked by each rank. The kernel drops a process's locks when it ends,
// however it ends; a child that it has forked does not hold them.
struct flock lock_of(int rank, short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

class SharedMemory final : public PeerMemory {
 public:
  SharedMemory(int descriptor, int rank, int world)
      : PeerMemory(rank, world), descriptor_(descriptor), owner_(getpid()) {
    try {
      base_ = map(total_bytes(world), MAP_SHARED, descriptor);
      struct flock lock = lock_of(rank, F_WRLCK);
      if (fcntl(descriptor, F_SETLK, &lock) != 0) {
        fail("cannot mark rank " + std::to_string(rank) + " as alive", "use the gloo backend");
      }
      place(base_);
    } catch (...) {
      release();
      throw;
    }
  }

  ~SharedMemory() override {
    if (getpid() == owner_) leave();  // a forked child has the mapping, and is not the rank
    release();
  }

  bool gone(int rank) const override {
    if (control(rank).process.load(std::memory_order_acquire) == 0) return false;  // not yet there
    if (control(rank).left.load(std::memory_order_acquire) != 0) return true;
    struct flock lock = lock_of(rank, F_WRLCK);
    return rank != this->rank() && fcntl(descriptor_, F_GETLK, &lock) == 0 &&
           lock.l_type == F_UNLCK;
  }

  int descriptor() const override { return descriptor_; }

 protected:
  void allocate(size_t offset, size_t bytes) override {
    int error;
    do {
      error = posix_fallocate(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error == 0) return;
    errno = error;
    fail("cannot have " + std::to_string(bytes) + " bytes of memory",
         "free memory, or raise the memory limit of the container");
  }

 private:
  void release() {
    if (base_ != nullptr) munmap(base_, total_bytes(world()));
    close(descriptor_);
  }

  int descriptor_;
  pid_t owner_;
  std::byte* base_ = nullptr;
};

// One anonymous mapping for all ranks of this process.
class LoopbackMemory final : public PeerMemory {
 public:
  using Mapping = std::shared_ptr<std::byte>;

  static Mapping make(int world) {
    const size_t bytes = total_bytes(world);
    return Mapping(map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1),
                   [bytes](std::byte* base) { munmap(base, bytes); });
  }

  LoopbackMemory(Mapping mapping, int rank, int world)
      : PeerMemory(rank, world), mapping_(std::move(mapping)) {
    place(mapping_.get());
  }
  ~LoopbackMemory() override { leave(); }

  bool gone(int rank) const override {
    return control(rank).left.load(std::memory_order_acquire) != 0;
  }

 protected:
  void allocate(size_t, size_t) override {}  // private pages come when they are touched

 private:
  Mapping mapping_;
};

}  // namespace

size_t PeerMemory::total_bytes(int world) {
  return slots_offset(world) + static_cast<size_t>(world) * kSlots * kSlotBytes;
}

void PeerMemory::place(std::byte* base) {
  base_ = base;
  slots_ = base + slots_offset(world_);
  abort_ = reinterpret_cast<AbortRecord*>(base);
  for (int rank = 0; rank < world_; ++rank) {
    // All zero is their first state, and other ranks may be using theirs: nothing is constructed.
    control_.push_back(
        reinterpret_cast<ControlBlock*>(base + abort_bytes() + rank * control_bytes()));
  }
  allocate(0, slots_offset(world_));
  grow(1);
  ControlBlock& own = control(rank_);
  cpu_set_t processors;
  if (sched_getaffinity(0, sizeof processors, &processors) == 0) {
    static_assert(sizeof processors == sizeof own.processors);
    std::memcpy(own.processors, &processors, sizeof processors);
  }
  own.process.store(getpid(), std::memory_order_release);
}

void PeerMemory::grow(size_t bytes) {
  if (bytes > kSlotBytes) {
    throw PeerError("shared memory: a step of " + std::to_string(bytes) +
                    " bytes; allowed: " + std::to_string(kSlotBytes));
  }
  const size_t wanted = std::min(kSlotBytes, std::bit_ceil(std::max(bytes, kFirstReserve)));
  for (int index = 0; index < kSlots; ++index) {
    allocate(static_cast<size_t>(slot(rank_, index) - base_) + reserved_, wanted - reserved_);
  }
  reserved_ = wanted;
}

void PeerMemory::leave() {
  if (control_.empty()) return;
  ControlBlock& own = control(rank_);
  own.left.store(1, std::memory_order_release);
}

std::shared_ptr<PeerMemory> PeerMemory::create(int rank, int world) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < total_bytes(world)) {
    // ftruncate would not only fail: SIGXFSZ ends a process that does not ignore it.
    throw PeerError(
        "shared memory: " + std::to_string(total_bytes(world)) +
        " bytes of addresses in an anonymous file; allowed: " + std::to_string(limit.rlim_cur) +
        ". Fix: raise the limit of file sizes (ulimit -f), or use the gloo backend");
  }
  const int descriptor = memfd_create("tpkernels", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) fail("memfd_create failed", "use the gloo backend");
  if (ftruncate(descriptor, static_cast<off_t>(total_bytes(world))) != 0 ||
      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(descriptor);
    errno = error;
    fail("cannot fix the size of an anonymous file", "raise ulimit -f, or use the gloo backend");
  }
  return std::make_shared<SharedMemory>(descriptor, rank, world);
}

std::shared_ptr<PeerMemory> PeerMemory::attach(int descriptor, int rank, int world) {
  return std::make_shared<SharedMemory>(descriptor, rank, world);
}

std::vector<std::shared_ptr<PeerMemory>> PeerMemory::loopback(int world) {
  const LoopbackMemory::Mapping mapping = LoopbackMemory::make(world);
  std::vector<std::shared_ptr<PeerMemory>> views;
  for (int rank = 0; rank < world; ++rank) {
    views.push_back(std::make_shared<LoopbackMemory>(mapping, rank, world));
  }
  return views;
}

}  // namespace tpkernels
