#include "serve/request_table.h"

#include <algorithm>

#include "base/check.h"

namespace helm {

Active& RequestTable::add(std::unique_ptr<Active> request) {
  const RequestId id = request->id;
  if (!requests_.empty() && requests_.rbegin()->first >= id) {
    fail(ErrorKind::kInvalid, "[generate] request ", id, " comes after request ",
         requests_.rbegin()->first, "; ids must grow");
  }
  Active& added = *requests_.emplace(id, std::move(request)).first->second;
  waiting_.push_back(&added);
  return added;
}

Active* RequestTable::find(RequestId id) const {
  const auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : it->second.get();
}

void RequestTable::move(Active& request, List& from, List& to) {
  const auto later = [](const Active* a, const Active* b) { return a->id < b->id; };
  to.insert(std::upper_bound(to.begin(), to.end(), &request, later), &request);
  std::erase(from, &request);
}

void RequestTable::admit(Active& request) {
  move(request, waiting_, running_);
  request.state = Active::State::kRunning;
}

void RequestTable::park(Active& request) {
  move(request, running_, waiting_);
  request.state = Active::State::kWaiting;
}

void RequestTable::end(Active& request) {
  if (request.state == Active::State::kDone) return;
  std::erase(request.state == Active::State::kWaiting ? waiting_ : running_, &request);
  request.state = Active::State::kDone;
}

void RequestTable::forget(RequestId id) {
  const auto it = requests_.find(id);
  if (it != requests_.end() && it->second->state == Active::State::kDone) requests_.erase(it);
}

}  // namespace helm
