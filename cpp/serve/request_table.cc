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

void RequestTable::admit(Active& request) {
  const auto later = [](const Active* a, const Active* b) { return a->id < b->id; };
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &request, later), &request);
  std::erase(waiting_, &request);
  request.state = Active::State::kRunning;
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
