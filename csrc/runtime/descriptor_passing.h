// Hands an open file to other processes of this host, over a Unix socket in the abstract namespace:
// its name is no file, and goes with the socket.
#pragma once

#include <chrono>
#include <string>

namespace tpkernels {

// Offers a descriptor under an address that nobody can guess. Only processes of the same user get
// it.
class DescriptorOffer {
 public:
  DescriptorOffer();  // throws PeerError
  ~DescriptorOffer();
  DescriptorOffer(const DescriptorOffer&) = delete;

  const std::string& address() const { return address_; }
  // Until `takers` processes have it. Throws PeerError after `limit`, naming how many came.
  void serve(int descriptor, int takers, std::chrono::duration<double> limit);

 private:
  std::string address_;
  int socket_;
};

// What is offered at `address`; the caller closes it. Throws PeerError.
int take_descriptor(const std::string& address, std::chrono::duration<double> limit);

}  // namespace tpkernels
