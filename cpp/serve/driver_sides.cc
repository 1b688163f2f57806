// On which side the KV of running requests lies, where the plan lets it move. As the accelerator's
// pool runs full, the request of the least rank goes to host memory as a whole, where the CPU
// attends to it; the first of these comes back when there is room.
#include <algorithm>

#include "serve/driver.h"

namespace helm {
namespace {

constexpr int64_t kLeastStay = 8;  // steps in host memory

}  // namespace

// Blocks of the request's sequence that are not on the accelerator.
int64_t Driver::far_blocks(const Active& active) const {
  const int64_t page_tokens = engine_.plan().kv.page_tokens;
  const int64_t all = (engine_.length(active.sequence) + page_tokens - 1) / page_tokens;
  return std::max<int64_t>(0, all - engine_.near_blocks(active.sequence));
}

void Driver::move(Active& active, KvSide side) {
  const bool changes = engine_.side(active.sequence) != side;
  engine_.move(active.sequence, side);
  if (!changes) return;
  ++(side == KvSide::kFar ? moves_far_ : moves_near_);
  active.moved = steps_;
}

// Whether several requests have KV on the accelerator.
bool Driver::shares_near() const {
  const RequestTable::List& running = table_.running();
  return std::count_if(running.begin(), running.end(), [&](const Active* active) {
           return engine_.near_blocks(active->sequence) > 0;
         }) > 1;
}

// One that is partly far, after a prompt that went on from far KV, goes to one side as a whole, but
// if it is the only one that is near. Else the first one that is far comes back, if that leaves
// each near one a block to grow by.
void Driver::settle_sides() {
  if (!engine_.moves()) return;
  Active *partly = nullptr, *first = nullptr;
  int64_t near = 0;
  for (Active* active : table_.running()) {
    near += engine_.near_blocks(active->sequence) > 0;
    if (!active->own_sequence() || !active->decoding()) continue;
    const bool far = engine_.side(active->sequence) == KvSide::kFar;
    if (far ? steps_ < active->moved + kLeastStay : far_blocks(*active) == 0) {
      continue;
    }
    Active*& found = far ? first : partly;
    if (found == nullptr || Ranking::yields(found->place, active->place)) found = active;
  }
  Active* const one = partly != nullptr ? partly : first;
  if (one == nullptr) return;
  const int64_t wanted = far_blocks(*one) + near + 1;
  if (wanted <= engine_.near_room() && engine_.can_move(one->sequence, KvSide::kNear)) {
    move(*one, KvSide::kNear);
  } else if (one == partly && near > 1 && engine_.can_move(one->sequence, KvSide::kFar)) {
    move(*one, KvSide::kFar);
  }
}

// Blocks that the batch adds on the accelerator.
int64_t Driver::near_wanted() const {
  int64_t wanted = 0;
  for (const BatchRow& row : batch_.rows) {
    wanted += engine_.near_wanted(table_.running()[row.runner]->sequence, row.tokens);
  }
  return wanted;
}

// Whether nothing has to leave the accelerator for them.
bool Driver::fits_near() const {
  const int64_t wanted = engine_.moves() ? near_wanted() : 0;
  return wanted == 0 || wanted <= engine_.near_room();
}

// Of those that have KV on the accelerator the one that gives way first. moves: that can leave and
// be computed on.
Active* Driver::least_near(bool moves) const {
  Active* least = nullptr;
  for (Active* active : table_.running()) {
    if (!active->own_sequence() || engine_.near_blocks(active->sequence) == 0) continue;
    const bool can = active->decoding() && engine_.can_move(active->sequence, KvSide::kFar);
    if (moves && !can) continue;
    if (least == nullptr || Ranking::yields(active->place, least->place)) least = active;
  }
  return least;
}

// Makes room on the accelerator: what is kept leaves first, then one that decodes.
bool Driver::move_someone() {
  if (room_.leave_near()) return true;
  Active* const least = least_near(true);
  if (least == nullptr || !shares_near()) return false;
  move(*least, KvSide::kFar);
  return true;
}

// Makes room on the accelerator for the batch; false if it is to be planned again.
bool Driver::make_near() {
  return !move_someone() && (hold_prompts() || !park_someone());
}

// Where nobody can move, prompts wait, the last ones first; whether the others' rows fit.
bool Driver::hold_prompts() {
  for (size_t i = batch_.rows.size(); i-- > 0 && batch_.rows.size() > 1;) {
    const Active& active = *table_.running()[batch_.rows[i].runner];
    if (active.decoding() || engine_.near_wanted(active.sequence, batch_.rows[i].tokens) == 0) {
      continue;
    }
    batch_.rows.erase(batch_.rows.begin() + static_cast<std::ptrdiff_t>(i));
    if (fits_near()) return true;
  }
  return false;
}

// With the host's memory full as well. One that is alone is not: its blocks leave one by one.
bool Driver::park_someone() {
  Active* const least = least_near(false);
  if (least == nullptr || !shares_near()) return false;
  park(*least);
  return true;
}

// Whether those that are far find blocks in host memory to grow by.
bool Driver::fits_far() const {
  if (!engine_.moves()) return true;
  int64_t wanted = 0;
  for (const BatchRow& row : batch_.rows) {
    wanted += engine_.far_wanted(table_.running()[row.runner]->sequence, row.tokens);
  }
  return wanted <= engine_.far_room();
}

// Makes room in host memory for the batch: what is kept leaves first. Then the far request of the
// least rank comes near, if there is room beside what the batch adds there, or is parked. False if
// the batch is to be planned again: one that is alone goes on with blocks on both sides.
bool Driver::make_far() {
  if (room_.leave_far()) return false;
  const RequestTable::List& running = table_.running();
  Active* least = nullptr;
  for (Active* active : running) {
    if (!active->own_sequence() || engine_.side(active->sequence) != KvSide::kFar) continue;
    if (least == nullptr || Ranking::yields(active->place, least->place)) least = active;
  }
  if (least == nullptr || running.size() == 1) return true;
  if (near_wanted() + far_blocks(*least) < engine_.near_room() &&
      engine_.can_move(least->sequence, KvSide::kNear)) {
    move(*least, KvSide::kNear);
  } else {
    park(*least);
  }
  return false;
}

}  // namespace helm
