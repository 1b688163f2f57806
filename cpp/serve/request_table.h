// The requests of a driver by id, from arrival to end. Decides nothing, and knows no engine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "serve/active_request.h"

namespace helm {

// Ids grow with arrival. Both lists are in order of arrival; what has ended is in neither, and
// known until it is forgotten.
class RequestTable {
 public:
  using List = std::vector<Active*>;

  Active& add(std::unique_ptr<Active> request);
  Active* find(RequestId id) const;  // null: not known
  void admit(Active& request);       // from waiting to running
  void park(Active& request);        // from running to waiting
  void end(Active& request);         // its state becomes kDone
  void forget(RequestId id);         // of one that has ended

  const List& waiting() const { return waiting_; }
  const List& running() const { return running_; }  // those that are ending too
  bool empty() const { return waiting_.empty() && running_.empty(); }
  int64_t known() const { return static_cast<int64_t>(requests_.size()); }

 private:
  static void move(Active& request, List& from, List& to);

  std::map<RequestId, std::unique_ptr<Active>> requests_;
  List waiting_;
  List running_;
};

}  // namespace helm
