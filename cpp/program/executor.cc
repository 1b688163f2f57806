#include "program/executor.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cpu/stage.h"
#include "program/lower.h"

namespace helm {
namespace {

using Verb = Task::Verb;

}  // namespace

Executor::Executor(const Plan& plan, const Weights& weights, KvCache& kv,
                   std::vector<Account*> accounts)
    : plan_(with_partials(plan)), disk_(weights.disk()), kv_(kv), accounts_(std::move(accounts)) {
  std::vector<Program> programs = lower(plan_);
  create_buffers();
  const auto visiting = std::ranges::find_if(programs, &Program::brings);
  if (visiting != programs.end()) {
    const std::span pages(cpu::host_pointer(buffers_[kCpu].kv()),
                          static_cast<size_t>(buffers_[kCpu].kv_bytes()));
    weights_aside_ = accounts_.back()->device().create_stream();
    visits_ = std::make_unique<Visits>(plan_, *visiting, weights, pages, *accounts_.back());
  }
  if (kv.overflows()) {
    pages_aside_ = accounts_.back()->device().create_stream();
    paging_ = std::make_unique<Paging>(plan_, kv, buffers_.back().kv(), *pages_aside_,
                                       *accounts_[kCpu], *accounts_.back());
  }
  stages_ =
      std::make_unique<Stages>(plan_, weights, buffers_, accounts_, visits_.get(), paging_.get());
  for (Program& program : programs) programs_.push_back(stages_->bind(std::move(program)));
  create_flights();
  const auto turns = std::ranges::find_if(
      programs_, [](const BoundProgram& one) { return one.program.takes_turns(); });
  if (split_rows(plan_) == 0 || turns == programs_.end()) return;
  second_program_ = stages_->bind(turns->program, kSecondBatch);
  second_.program = &second_program_;
}

Executor::~Executor() = default;

void Executor::create_buffers() {
  std::vector<ValueIndex> partials;
  for (size_t v = plan_.values.size() - (kv_.overflows() ? 2 : 0); v < plan_.values.size(); ++v) {
    partials.push_back(static_cast<ValueIndex>(v));
  }
  const bool visited = plan_.schedule.visit_tokens > 0;
  for (size_t d = 0; d < accounts_.size(); ++d) {
    Account& account = *accounts_[d];
    streams_.push_back(account.device().create_stream());
    if (d == kCpu) {
      buffers_.emplace_back(plan_, kCpu, resident_units(plan_), std::span<ValueIndex>(),
                            kv_.cpu_bytes(), 0, account);
    } else {
      buffers_.emplace_back(plan_, static_cast<DeviceIndex>(d),
                            visited ? visiting_units(plan_) : resident_units(plan_), partials,
                            kv_.near_bytes(), split_rows(plan_), account);
    }
  }
}

void Executor::create_flights() {
  int64_t bytes = 0;
  for (const BoundProgram& one : programs_) bytes = std::max(bytes, one.staging_bytes);
  const auto create = [&](Flight& flight, int64_t staging_bytes) {
    flight.rows.reserve(plan_.limits);
    if (accounts_.size() == 1) return;
    Device& device = accounts_.back()->device();
    if (staging_bytes > 0) {
      flight.staging =
          StagingMemory(*accounts_[kCpu], device, staging_bytes, "activations that cross");
    }
    flight.logits = flight.staging.data();
    for (auto& event : flight.events) event = device.create_event();
  };
  for (Flight& flight : flights_) create(flight, bytes);
  const int64_t rows = split_rows(plan_);
  if (rows > 0) create(second_, stages_->crossing_bytes(programs_.front(), rows));
}

void Executor::check_devices() const {
  if (failure_.empty()) return;
  fail(ErrorKind::kDevice, "[engine] a device has failed (", failure_, "); load the model anew");
}

StepRows& Executor::second_rows() {
  finish();
  return second_.rows;
}

void Executor::begin(Flight& flight, const BoundProgram& program) {
  flight.program = &program;
  flight.next = 0;
  flight.kept.clear();
  flight.rows.number = next_step_number();
  flight.views.make(flight.rows, plan_.kv, program.program, program.visiting);
  far_rows_ += static_cast<int64_t>(flight.rows.far.on_cpu);
}

void Executor::submit(bool split) {
  Flight& flight = flights_[next_];
  const BoundProgram& program = program_for(flight.rows, split);
  const bool visits = program.program.visits;
  // Pages in host memory are the CPU's or a device's to write, not both at once.
  if (in_flight_ > 0 && (oldest().program->program.visits != visits || oldest().ended())) finish();
  check_devices();
  begin(flight, program);
  flight.second = split ? &second_ : nullptr;
  visiting_steps_ += program.brings;
  (split ? split_steps_ : joint_steps_) += program.program.cpu_attends();
  try {
    if (split) {
      begin(second_, second_program_);
      second_.logits = flight.logits + flight.outputs() * plan_.vocab_size * int64_t{sizeof(float)};
      walk_in_turns(flight);
    } else {
      walk(flight, program.program.whole ? Until::kEnd : Until::kAwaited);
    }
  } catch (const Error& error) {
    failure_ = error.what();
    throw;
  }
  next_ = (next_ + 1) % flights_.size();
  ++in_flight_;
}

// The first sub-batch of a split step runs in parts, too, so that the other has its turns.
const BoundProgram& Executor::program_for(const StepRows& rows, bool split) const {
  const StepView step = rows.view();
  const int64_t least = plan_.schedule.visit_tokens;
  const bool visits =
      visits_ != nullptr && least > 0 && step.tokens() >= least && visits_->holds(step);
  return *std::ranges::find_if(programs_, [&](const BoundProgram& one) {
    return one.program.visits == visits && one.program.pages_visit() == rows.far.visit() &&
           one.program.cpu_attends() == (split || rows.far.on_cpu > 0);
  });
}

// Enqueues tasks up to the first of the CPU that must wait for a device, or, waiting, further.
void Executor::walk(Flight& flight, Until until) {
  const std::vector<Bound>& tasks = flight.program->tasks;
  for (const size_t begun = flight.next; flight.next < tasks.size(); ++flight.next) {
    const Bound& bound = tasks[flight.next];
    const bool on_cpu = bound.task.device == kCpu;
    const bool awaited = on_cpu && bound.waits == Bound::kMain;
    const bool turn = awaited || bound.task.verb == Verb::kNear;
    if (until == Until::kTurn && turn && flight.next > begun) return;
    if (awaited) {
      if (until == Until::kAwaited) return;
      await(flight);
    } else if (attends_for_none(bound, flight)) {
      continue;
    } else if (on_cpu && bound.waits == Bound::kAside) {
      flight.events[Bound::kAside]->synchronize();
    } else if (bound.waits != Bound::kHost) {
      queue(bound.task).wait(*flight.events[bound.waits]);
    }
    enqueue(bound, flight);
    if (!bound.records) continue;
    queue(bound.task).record(*flight.events[bound.task.aside ? Bound::kAside : Bound::kMain]);
    flight.awaited = true;
  }
  if (until == Until::kEnd && flight.awaited) await(flight);
}

// While the CPU attends for one sub-batch the device has the work of the other's last turn. Near
// attention of the same rows comes behind that: a turn begins with it.
void Executor::walk_in_turns(Flight& first) {
  const std::array flights = {&first, first.second};
  while (!std::ranges::all_of(flights, &Flight::walked)) {
    for (Flight* const flight : flights) {
      if (flight->walked()) continue;
      walk(*flight, Until::kTurn);
      if (flight->walked() && !logits_cross()) keep(first, flight->outputs());
    }
  }
}

void Executor::await(Flight& flight) const {
  if (visits_ != nullptr) visits_->give_back();
  flight.events[Bound::kMain]->synchronize();
  flight.awaited = false;
}

bool Executor::attends_for_none(const Bound& bound, const Flight& flight) {
  const Task& task = bound.task;
  return task.verb == Verb::kFar && task.device == kCpu && flight.views.far_on_cpu.tokens() == 0;
}

void Executor::enqueue(const Bound& bound, const Flight& flight) {
  const Task& task = bound.task;
  switch (task.verb) {
    case Verb::kCopy:
      return copy(bound, flight);
    case Verb::kVisit:
      return visits_->load(task.begin, queue(task));
    case Verb::kCached:
    case Verb::kWritten:
      return visits_->move_pages(task.begin, task.verb == Verb::kCached, flight.views, main());
    case Verb::kPage:  // in turn with the run behind it
    case Verb::kRead:  // by threads of its own, ahead of the steps
      return;
    default:
      return task.each ? visit_far_pages(bound, flight) : run(bound, flight);
  }
}

// In which a task is enqueued. What has left is in host memory where the pages' copies are done.
Stream& Executor::queue(const Task& task) {
  if (task.aside) return task.verb == Verb::kVisit ? *weights_aside_ : *pages_aside_;
  return *streams_[static_cast<size_t>(task.device)];
}

void Executor::copy(const Bound& bound, const Flight& flight) {
  const Task& task = bound.task;
  const int64_t bytes = bytes_of(bound, flight);
  if (bytes == 0) return;
  DeviceAddress there = buffers(task.device).value(task.value, flight.program->batch);
  std::byte* host = bound.host;
  if (host == nullptr) {
    const bool out = task.value == plan_.logits && logits_cross();
    host = out ? flight.logits : flight.staging.data() + bound.offset;
  } else {
    there = there + first_far_row(flight) * bound.width * int64_t{sizeof(float)};
  }
  if (task.lane == Task::Lane::kDown) {
    queue(task).download(host, there, bytes);
    return;
  }
  if (bound.host == nullptr) {
    std::memcpy(host, cpu::host_pointer(buffers_[kCpu].value(task.value)),
                static_cast<size_t>(bytes));
  }
  queue(task).upload(there, host, bytes);
}

int64_t Executor::bytes_of(const Bound& copy, const Flight& flight) const {
  const StepView& step = flight.views.on_cpu;
  const bool outputs = plan_.values[static_cast<size_t>(copy.task.value)].per_output;
  const int64_t rows = copy.host != nullptr ? flight.views.far_on_cpu.tokens()
                       : outputs            ? step.outputs()
                                            : step.tokens();
  return rows * copy.width * int64_t{sizeof(float)};
}

void Executor::run(const Bound& bound, const Flight& flight) {
  const Task& task = bound.task;
  Stream& stream = *streams_[static_cast<size_t>(task.device)];
  if (task.device != kCpu) {
    if (bound.buffer == nullptr) {
      bound.stages[0]->run(stream, flight.views.on_device);
    } else {
      stream.wait(*bound.buffer->loaded);
      bound.stages[0]->run(stream, flight.views.of_visits);
      stream.record(*bound.buffer->read);
    }
    return;
  }
  if (task.verb == Verb::kFar) {  // pages that left have arrived, too
    ++cpu_attentions_;
    bound.stages[0]->run(stream, flight.views.far_on_cpu);
    return;
  }
  for (const int32_t i : task.after) {  // values that have come with the flight
    const Bound& copy = flight.program->tasks[static_cast<size_t>(i)];
    if (copy.task.verb == Verb::kRead) continue;
    std::memcpy(cpu::host_pointer(buffers_[kCpu].value(copy.task.value)),
                flight.staging.data() + copy.offset, static_cast<size_t>(bytes_of(copy, flight)));
  }
  bound.stages[0]->run(stream, flight.views.on_cpu);
}

void Executor::visit_far_pages(const Bound& bound, const Flight& flight) {
  const AttentionOp& op = *attention_of(plan_.units[bound.task.begin]);
  const KvSpec& kv = plan_.kv;
  for (size_t i = 0; i < flight.views.far_pages.size(); ++i) {
    const StepViews::FarPage& page = flight.views.far_pages[i];
    const int64_t first_seen = op.window > 0 ? page.first_position - op.window + 1 : 0;
    if (page.block < first_seen / kv.page_tokens) continue;
    ++page_visits_;
    const size_t turn = stages_->far_pages().next();
    Ring::Buffer& buffer = stages_->far_pages()[turn];
    const std::byte* host = paging_->far_slot(0) + page.pages[op.layer] * kv.unit_bytes();
    pages_aside_->wait(*buffer.read);
    pages_aside_->upload(buffer.address, host, kv.page_bytes(static_cast<size_t>(op.layer)));
    pages_aside_->record(*buffer.loaded);
    main().wait(*buffer.loaded);
    bound.stages[turn]->run(main(), flight.views.of_far_page(i));
    main().record(*buffer.read);
  }
}

// A failure ends this step and all others.
void Executor::run_to_end(Flight& flight) {
  if (!failure_.empty()) return;
  try {
    walk(flight, Until::kEnd);
    if (flight.second != nullptr) walk(*flight.second, Until::kEnd);
  } catch (const Error& error) {
    failure_ = error.what();
  }
}

std::span<const float> Executor::collect() {
  Flight& flight = oldest();
  --in_flight_;
  run_to_end(flight);
  check_devices();
  return logits(flight);
}

void Executor::finish() {
  for (int64_t i = in_flight_; i > 0; --i) {
    Flight& flight = flights_[(next_ + flights_.size() - static_cast<size_t>(i)) % flights_.size()];
    run_to_end(flight);
    const bool kept = flight.second != nullptr || !flight.kept.empty();
    if (failure_.empty() && !logits_cross() && !kept) keep(flight, flight.outputs());
  }
}

// So many rows of logits, which lie with the CPU, where another step would overwrite them.
void Executor::keep(Flight& flight, int64_t outputs) const {
  const auto* own = cpu::host_pointer<const float>(buffers_[kCpu].value(plan_.logits));
  flight.kept.insert(flight.kept.end(), own, own + outputs * plan_.vocab_size);
}

std::span<const float> Executor::logits(const Flight& flight) const {
  if (!flight.kept.empty()) return flight.kept;
  const auto* first = logits_cross()
                          ? reinterpret_cast<const float*>(flight.logits)
                          : cpu::host_pointer<const float>(buffers_[kCpu].value(plan_.logits));
  const int64_t outputs =
      flight.outputs() + (flight.second != nullptr ? flight.second->outputs() : 0);
  return {first, static_cast<size_t>(outputs * plan_.vocab_size)};
}

}  // namespace helm
