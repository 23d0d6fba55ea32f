#include "runtime/descriptor_passing.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "runtime/interrupts.h"
#include "runtime/peer_memory.h"

namespace tpkernels {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& what) {
  const int error = errno;
  throw PeerError("passing shared memory between ranks: " + what + ": " + std::strerror(error) +
                  ". Fix: use the gloo backend");
}

// A socket of this process, closed with it.
class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Socket(const Socket&) = delete;
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

std::pair<sockaddr_un, socklen_t> abstract(const std::string& address) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;  // sun_path[0] stays 0: the abstract namespace
  const size_t length = std::min(address.size(), sizeof name.sun_path - 1);
  std::memcpy(name.sun_path + 1, address.data(), length);
  return {name, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

int milliseconds_until(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

// Whether `descriptor` can be read before `end`.
bool readable(int descriptor, Clock::time_point end) {
  for (;;) {
    pollfd entry = {descriptor, POLLIN, 0};
    const int found = poll(&entry, 1, milliseconds_until(end));
    if (found > 0) return true;
    if (found == 0) return false;
    if (errno != EINTR) fail("poll failed");
    check_interrupt();
  }
}

Clock::time_point end_of(std::chrono::duration<double> limit) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
}

bool same_user(int socket) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

union Control {  // room for one descriptor beside a message, aligned as the kernel wants it
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

bool send_descriptor(int socket, int descriptor) {
  char byte = 0;
  iovec data = {&byte, 1};
  Control control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  return sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

int receive_descriptor(int socket) {
  char byte = 0;
  iovec data = {&byte, 1};
  Control control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  const ssize_t received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (received < 0) fail("recvmsg failed");
  if (received == 0) {
    throw PeerError(
        "passing shared memory between ranks: the rank that made it closed the connection. Fix: "
        "see why it gave up");
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    throw PeerError(
        "passing shared memory between ranks: the message came without its descriptor. Fix: allow "
        "more open files (ulimit -n)");
  }
  int descriptor = -1;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
  return descriptor;
}

}  // namespace

DescriptorOffer::DescriptorOffer() : socket_(-1) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random) fail("getrandom failed");
  static const char kHex[] = "0123456789abcdef";
  address_ = "tpkernels-";
  for (const unsigned char byte : random) {
    address_ += kHex[byte >> 4];
    address_ += kHex[byte & 15];
  }
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) fail("no Unix socket");
  const auto [name, length] = abstract(address_);
  if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0) {
    fail("cannot listen on a Unix socket");
  }
  socket_ = socket.release();
}

DescriptorOffer::~DescriptorOffer() { close(socket_); }

void DescriptorOffer::serve(int descriptor, int takers, std::chrono::duration<double> limit) {
  const Clock::time_point end = end_of(limit);
  int served = 0;
  while (served < takers) {
    if (Clock::now() >= end || !readable(socket_, end)) {
      throw PeerError("passing shared memory between ranks: " + std::to_string(served) + " of " +
                      std::to_string(takers) + " ranks came for it in time");
    }
    const Socket taker(accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC));
    if (taker.get() < 0) {
      if (errno == ECONNABORTED || errno == EAGAIN || errno == EINTR)
        continue;  // it has gone again
      fail("cannot accept rank " + std::to_string(served + 1) + " of " + std::to_string(takers));
    }
    if (same_user(taker.get()) && send_descriptor(taker.get(), descriptor)) ++served;
  }
}

int take_descriptor(const std::string& address, std::chrono::duration<double> limit) {
  const Clock::time_point end = end_of(limit);
  const Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) fail("no Unix socket");
  const auto [name, length] = abstract(address);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    fail("no connection to the rank that made it");
  }
  if (!readable(socket.get(), end)) {
    throw PeerError("passing shared memory between ranks: the rank that made it sent nothing");
  }
  return receive_descriptor(socket.get());
}

}  // namespace tpkernels
