#include "engine.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "refuse.h"

namespace vkvmap {
namespace {

// Enough to keep a thread streaming, small enough that several threads share one job.
constexpr uint64_t kSmallestSlice = 128 * 1024;
// Of a job that publishes progress, on movers that would carry it in one go.
constexpr uint64_t kProgressSlice = uint64_t{16} << 20;
// Reports that nobody collects are kept up to here per lane; then the oldest go, and are counted.
// Callers that only ever wait for their jobs never collect: 4096 cost them 5 MiB for good.
constexpr size_t kMaxReports = size_t{1} << 12;

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Waits on a condition for `seconds`, or without limit if negative.
template <typename Condition>
bool wait_for(std::condition_variable& signal, std::unique_lock<std::mutex>& lock, double seconds,
              Condition condition) {
  if (seconds < 0) {
    signal.wait(lock, condition);
    return true;
  }
  // Beyond a day the clock's arithmetic, not the wait, would be what matters.
  return signal.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 86400.0)),
                         condition);
}

// Engines of this process. A forked child starts with an empty list of its own, because the lock it
// inherits may be held by a thread that it has not inherited.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Engine>> engines;
};
Registry* g_registry = new Registry;  // never freed: workers may outlive static destruction
[[maybe_unused]] const int g_registry_is_left_to_the_parent =
    pthread_atfork(nullptr, nullptr, [] { g_registry = new Registry; });

// A condition variable on which the parent's threads wait cannot be destroyed in a forked child, so
// what belongs to the parent is abandoned there.
template <typename T>
std::shared_ptr<T> owned_by_this_process(T* object) {
  return std::shared_ptr<T>(object, [home = Home()](T* owned) {
    if (home.is_here()) delete owned;
  });
}

std::string describe(const Plan& plan, const PageFailure& failure) {
  return text(plan.layer_name(failure.layer_id), ", block ", failure.block, ", canonical page ",
              failure.page, ": ", failure.why);
}

uint64_t page_id(const Plan& plan, const WorkList& list, const BlockPair& pair) {
  return uint64_t{pair.row} * plan.classes()[list.class_index].pages_per_row + pair.page;
}

}  // namespace

void TimeHistogram::add(double seconds) {
  const double micros = std::max(0.0, seconds * 1e6);
  size_t bucket = 0;
  while (bucket + 1 < kBuckets && micros >= std::ldexp(1.0, static_cast<int>(bucket))) ++bucket;
  ++counts[bucket];
  sum_seconds += std::max(0.0, seconds);
}

bool Job::wait(double seconds) {
  if (done()) return true;
  if (!home_.is_here()) {
    throw std::runtime_error("wait: this job belongs to the parent process; wait for it there");
  }
  {
    std::unique_lock<std::mutex> lock(wait_mutex_);
    if (!wait_for(waiters_, lock, seconds, [this] { return done(); })) return false;
  }
  if (const std::shared_ptr<Engine> engine = engine_.lock()) engine->reap();
  return true;
}

bool Job::cancel() {
  if (!home_.is_here()) return false;
  const std::shared_ptr<Engine> engine = engine_.lock();
  return engine && engine->cancel(*this);
}

std::shared_ptr<Engine> Engine::create(size_t num_threads) {
  if (num_threads == 0 || num_threads > 1024) {
    refuse("engine: ", num_threads, " threads; an engine has 1 to 1024");
  }
  std::shared_ptr<Engine> engine = owned_by_this_process(new Engine(num_threads));
  engine->self_ = engine;
  std::lock_guard<std::mutex> lock(g_registry->mutex);
  auto& engines = g_registry->engines;
  engines.erase(std::remove_if(engines.begin(), engines.end(),
                               [](const std::weak_ptr<Engine>& held) { return held.expired(); }),
                engines.end());
  engines.push_back(engine);
  return engine;
}

Engine::Engine(size_t num_threads) : num_threads_(num_threads) {}

Engine::~Engine() { shutdown(false, -1); }

void Engine::shutdown_all(double drain_seconds) {
  std::vector<std::shared_ptr<Engine>> engines;
  {
    std::lock_guard<std::mutex> lock(g_registry->mutex);
    for (const auto& held : g_registry->engines) {
      if (std::shared_ptr<Engine> engine = held.lock()) engines.push_back(std::move(engine));
    }
  }
  for (const auto& engine : engines) {
    if (!engine->shutdown(true, drain_seconds)) engine->shutdown(false, -1);
  }
}

void Engine::check_usable() const {
  if (!home_.is_here()) {
    throw std::runtime_error(
        "engine: its threads belong to the parent process and do not survive fork(); make a new "
        "engine in the child");
  }
}

// Submission ---------------------------------------------------------------------------------

JobPtr Engine::submit(const SubmitRequest& request) {
  check_usable();
  reap();
  if (!request.plan) refuse("submit: there is no plan");
  if (request.expedited && request.direction != Direction::Load) {
    refuse("submit: a store cannot be expedited; only loads can");
  }
  const Plan& plan = *request.plan;
  Mover& mover = request.mover ? *request.mover : find_mover("host");

  JobPtr job = owned_by_this_process(new Job);
  std::lock_guard<std::mutex> submit_lock(submit_mutex_);
  Transfer& transfer = job->transfer_;
  transfer = intake_.read(request);
  if (transfer.num_units != 0) {
    transfer.state = plan.mover_state(mover);
    transfer.ticket = mover.admit(transfer, request.stream);
  }

  job->tag_ = request.tag;
  job->direction_ = request.direction;
  job->lane_ = request.direction == Direction::Store ? Lane::Store
               : request.expedited                   ? Lane::Expedited
                                                     : Lane::Load;
  job->mover_ = &mover;
  job->report_ = request.report;
  job->notify_ = request.notify;
  job->engine_ = self_;
  job->plan_ = request.plan;
  job->keep_ = request.keep;
  if (request.progress.words) {
    auto progress = std::make_unique<Job::Progress>();
    progress->words = request.progress;
    progress->left.resize(uint64_t{plan.max_layer_id()} + 1);
    progress->failed.resize(progress->left.size());
    for (const WorkList& list : transfer.lists) {
      for (uint32_t l = 0; l < list.num_layers; ++l) {
        progress->left[plan.layers()[list.first_layer + l].layer_id] += list.num_pairs;
      }
    }
    job->progress_ = std::move(progress);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("engine: it has been shut down; make a new one");
    start_threads(mover.waits());
  }
  job->seq_ = next_seq_++;
  const std::vector<uint64_t>& overlaps =
      intake_.note(request, transfer, job->seq_, oldest_live_.load(std::memory_order_acquire));
  job->submitted_at_ = now();
  enqueue(job, overlaps, request);
  return job;
}

void Engine::enqueue(const JobPtr& job, const std::vector<uint64_t>& overlaps,
                     const SubmitRequest& request) {
  std::vector<JobPtr> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("engine: it has been shut down; make a new one");
    if (job->progress_) {  // a layer of which nothing moves is in place already
      const Plan& plan = *job->plan_;
      for (const LayerEntry* e = plan.layers(); e < plan.layers() + plan.header().num_layers; ++e) {
        const bool wanted = e->layer_id >= request.layers.first && e->layer_id < request.layers.end;
        if (!wanted || job->progress_->left[e->layer_id] != 0) continue;
        __atomic_store_n(&request.progress.words[e->layer_id], request.progress.value,
                         __ATOMIC_RELEASE);
      }
    }
    while (live_first_ + live_.size() < job->seq_) live_.push_back(nullptr);
    for (uint64_t seq : overlaps) {
      if (seq < live_first_ || !live_[seq - live_first_]) continue;
      live_[seq - live_first_]->dependents_.push_back(job);
      ++job->dependencies_;
    }
    live_.push_back(job);
    ++num_live_;
    ++counters_[{job->direction_, job->mover_}].submitted;
    if (job->report_) {
      std::deque<JobPtr>& lane = lanes_[static_cast<size_t>(job->lane_)];
      lane.push_back(job);
      if (lane.size() > kMaxReports && lane.front()->done()) {
        lane.pop_front();
        ++reports_dropped_;
      }
    }
    if (job->dependencies_ == 0) {
      if (job->transfer_.num_units == 0) {
        end_jobs(job, ended);
      } else {
        make_ready(job);
      }
    }
  }
  announce(ended);
}

// Workers ------------------------------------------------------------------------------------

void Engine::start_threads(bool waits) {
  auto start = [this](size_t crew) {
    // Signals are the interpreter's: its main thread has to see them.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      threads_.emplace_back([this, crew] { work(crew); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#ifdef __linux__
    pthread_setname_np(threads_.back().native_handle(), crew == 0 ? "vkvmap-copy" : "vkvmap-lane");
#endif
  };
  while (!waits && copiers_started_ < num_threads_) {
    start(0);
    ++copiers_started_;
  }
  while (waits && lane_threads_started_ < kNumLanes) {
    start(1 + lane_threads_started_);
    ++lane_threads_started_;
  }
}

void Engine::work(size_t crew) {
  std::vector<JobPtr> ended;
  std::vector<Fault> faults;
  std::condition_variable& signal = crew == 0 ? copy_work_ : lane_work_[crew - 1];
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Slice slice;
    if (!take_slice(crew, slice)) {
      if (stopping_) return;
      if (crew == 0) ++idle_copiers_;
      signal.wait(lock);
      if (crew == 0) --idle_copiers_;
      continue;
    }
    // One sleeper wakes the next, so that submitting costs one wake-up at most.
    if (crew == 0 && idle_copiers_ > 0 && has_slice(crew)) copy_work_.notify_one();
    faults = faults_;
    lock.unlock();
    MoveReport report;
    run_slice(slice, report, faults);
    lock.lock();
    end_slice(slice, report, ended);
    if (!ended.empty()) {
      lock.unlock();
      announce(ended);
      ended.clear();
      slice.job.reset();
      lock.lock();
    }
  }
}

Engine::ReadyQueue* Engine::next_queue(size_t crew) {
  auto usable = [&](Lane lane) -> ReadyQueue* {
    ReadyQueue& queue = ready_[crew][static_cast<size_t>(lane)];
    const bool stalled = (stalled_lanes_ >> static_cast<size_t>(lane)) & 1;
    return stalled || queue.empty() ? nullptr : &queue;
  };
  if (ReadyQueue* queue = usable(Lane::Expedited)) return queue;
  // Stores and loads take turns, slice by slice, so that neither waits for the other's backlog.
  const Lane other = last_lane_ == Lane::Store ? Lane::Load : Lane::Store;
  if (ReadyQueue* queue = usable(other)) return queue;
  return usable(last_lane_ == Lane::Store ? Lane::Store : Lane::Load);
}

bool Engine::has_slice(size_t crew) { return next_queue(crew) != nullptr; }

bool Engine::take_slice(size_t crew, Slice& slice) {
  ReadyQueue* queue = next_queue(crew);
  if (!queue) return false;
  slice.job = queue->begin()->second;
  Job& job = *slice.job;
  if (crew == 0 && job.lane_ != Lane::Expedited) last_lane_ = job.lane_;
  if (job.state_ == JobState::Waiting) {
    job.state_ = JobState::Running;
    job.begun_at_ = now();
  }
  const Transfer& transfer = job.transfer_;
  uint64_t target = job.mover_->slice_bytes();
  // A layer's arrival can be told no sooner than the end of the slice that brings it.
  if (job.progress_) target = std::min(target, kProgressSlice);
  if (!job.mover_->waits()) {
    const uint64_t share = transfer.bytes / (8 * num_threads_);
    target = std::min(target, std::max(share, kSmallestSlice));
  }
  slice.first = job.next_unit_;
  uint64_t unit = job.next_unit_;
  uint64_t bytes = 0;
  for (const WorkList& list : transfer.lists) {
    const uint64_t end = list.first_unit + list.num_layers * list.num_pairs;
    if (end <= unit) continue;
    const LayerClass& c = transfer.plan->classes()[list.class_index];
    const uint64_t page_bytes = transfer.plan->page_bytes(c, transfer.direction);
    const uint64_t room = target > bytes ? target - bytes : 0;
    const uint64_t fit = std::max<uint64_t>(room / page_bytes, bytes == 0 ? 1 : 0);
    const uint64_t taken = std::min(fit, end - unit);
    unit += taken;
    bytes += taken * page_bytes;
    if (unit < end) break;
  }
  slice.last = unit;
  job.next_unit_ = unit;
  ++job.flying_slices_;
  if (unit == transfer.num_units) {
    queue->erase(queue->begin());
    job.queued_ = false;
  }
  return true;
}

void Engine::run_slice(const Slice& slice, MoveReport& report,
                       const std::vector<Fault>& faults) const {
  const Transfer& transfer = slice.job->transfer_;
  Mover& mover = *slice.job->mover_;
  const Plan& plan = *transfer.plan;
  auto fail = [&](uint64_t first, uint64_t last, const std::string& why) {
    for_each_stretch(transfer, first, last,
                     [&](const WorkList& list, uint32_t layer, uint64_t begin, uint64_t end) {
                       const uint32_t id = plan.layers()[list.first_layer + layer].layer_id;
                       for (uint64_t p = begin; p < end; ++p) {
                         const BlockPair& pair = list.pairs[p];
                         report.failures.push_back({id, pair.block, page_id(plan, list, pair), why});
                       }
                     });
  };
  auto move = [&](uint64_t first, uint64_t last) {
    MoveReport part;
    try {
      mover.move(transfer, first, last, part);
    } catch (const std::exception& error) {
      part = MoveReport{};
      fail(first, last, error.what());
    }
    report.bytes += part.bytes;
    report.fragments += part.fragments;
    report.pages += part.pages;
    report.failures.insert(report.failures.end(), part.failures.begin(), part.failures.end());
  };
  if (faults.empty()) {
    move(slice.first, slice.last);
    return;
  }
  for (uint64_t unit = slice.first; unit < slice.last; ++unit) {
    const Fault* hit = nullptr;
    for_each_stretch(transfer, unit, unit + 1,
                     [&](const WorkList& list, uint32_t layer, uint64_t begin, uint64_t) {
                       const uint32_t id = plan.layers()[list.first_layer + layer].layer_id;
                       const uint64_t page = page_id(plan, list, list.pairs[begin]);
                       for (const Fault& fault : faults) {
                         if (fault.direction == transfer.direction && fault.layer_id == id &&
                             fault.page == page) {
                           hit = &fault;
                         }
                       }
                     });
    if (hit) {
      fail(unit, unit + 1, hit->why);
    } else {
      move(unit, unit + 1);
    }
  }
}

void Engine::end_slice(const Slice& slice, MoveReport& report, std::vector<JobPtr>& ended) {
  Job& job = *slice.job;
  JobResult& result = job.result_;
  result.bytes += report.bytes;
  result.fragments += report.fragments;
  result.pages += report.pages;
  result.failed_pages += report.failures.size();
  if (job.progress_) account_progress(job, slice.first, slice.last, report);
  for (PageFailure& failure : report.failures) {
    if (result.failures.size() == kMaxFailures) break;
    result.failures.push_back(std::move(failure));
  }
  --job.flying_slices_;
  if (job.flying_slices_ == 0 && job.next_unit_ == job.transfer_.num_units) {
    end_jobs(slice.job, ended);
  }
}

void Engine::account_progress(Job& job, uint64_t first, uint64_t last, const MoveReport& report) {
  Job::Progress& progress = *job.progress_;
  for (const PageFailure& failure : report.failures) progress.failed[failure.layer_id] = true;
  for_each_stretch(job.transfer_, first, last,
                   [&](const WorkList& list, uint32_t layer, uint64_t begin, uint64_t end) {
                     const uint32_t id =
                         job.plan_->layers()[list.first_layer + layer].layer_id;
                     progress.left[id] -= end - begin;
                     if (progress.left[id] == 0 && !progress.failed[id]) {
                       __atomic_store_n(&progress.words.words[id], progress.words.value,
                                        __ATOMIC_RELEASE);
                     }
                   });
}

void Engine::make_ready(const JobPtr& job) {
  const size_t lane = static_cast<size_t>(job->lane_);
  const size_t crew = job->mover_->waits() ? 1 + lane : 0;
  ready_[crew][lane].emplace(job->seq_, job);
  job->queued_ = true;
  if (crew != 0) {
    lane_work_[lane].notify_one();
  } else if (idle_copiers_ > 0 && has_slice(crew)) {
    copy_work_.notify_one();
  }
}

// Ends a job and, in turn, those waiting jobs that have nothing left to do; a loop, because a chain
// of cancelled jobs may be long.
void Engine::end_jobs(JobPtr job, std::vector<JobPtr>& ended) {
  size_t next = ended.size();
  ended.push_back(std::move(job));
  for (; next < ended.size(); ++next) {
    Job& done = *ended[next];
    finish(done);
    std::vector<JobPtr> dependents = std::move(done.dependents_);
    for (JobPtr& dependent : dependents) {
      if (--dependent->dependencies_ != 0) continue;
      if (dependent->cancel_ || dependent->transfer_.num_units == 0) {
        ended.push_back(std::move(dependent));
      } else {
        make_ready(dependent);
      }
    }
  }
  oldest_live_.store(live_first_, std::memory_order_release);
  idle_.notify_all();
}

void Engine::finish(Job& job) {
  JobResult& result = job.result_;
  const double ended_at = now();
  const bool began = job.state_ == JobState::Running;
  result.queue_seconds = (began ? job.begun_at_ : ended_at) - job.submitted_at_;
  result.copy_seconds = began ? ended_at - job.begun_at_ : 0;
  const uint64_t units = job.transfer_.num_units;
  if (result.cancelled) {
    result.error = began ? text("cancelled after ", result.pages, " of ", units, " pages")
                         : "cancelled before it began";
  } else if (result.failed_pages != 0) {
    result.error = text(result.failed_pages, " of ", units, " pages failed; the first: ",
                        describe(*job.plan_, result.failures.front()));
  }
  Counters& counters = counters_[{job.direction_, job.mover_}];
  ++counters.finished;
  counters.cancelled += result.cancelled;
  counters.failed += !result.cancelled && result.failed_pages != 0;
  counters.bytes += result.bytes;
  counters.pages += result.pages;
  counters.fragments += result.fragments;
  counters.failed_pages += result.failed_pages;
  counters.queue.add(result.queue_seconds);
  counters.copy.add(result.copy_seconds);

  job.state_ = JobState::Done;
  job.transfer_ = Transfer{};
  job.progress_.reset();
  if (job.keep_) retired_.push_back(std::move(job.keep_));
  JobPtr& place = live_[job.seq_ - live_first_];
  if (job.notify_) {
    notifications_.push_back(place);
    notified_.notify_all();
  }
  place.reset();
  --num_live_;
  while (!live_.empty() && !live_.front()) {
    live_.pop_front();
    ++live_first_;
  }
  job.done_.store(true, std::memory_order_release);
}

void Engine::announce(const std::vector<JobPtr>& ended) {
  for (const JobPtr& job : ended) {
    { std::lock_guard<std::mutex> lock(job->wait_mutex_); }  // nobody is between test and sleep
    job->waiters_.notify_all();
  }
}

// Queries and endings ------------------------------------------------------------------------

std::vector<JobPtr> Engine::finished(Lane lane) {
  check_usable();
  reap();
  std::vector<JobPtr> reported;
  std::lock_guard<std::mutex> lock(mutex_);
  std::deque<JobPtr>& queue = lanes_[static_cast<size_t>(lane)];
  while (!queue.empty() && queue.front()->done()) {
    reported.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  return reported;
}

std::vector<JobPtr> Engine::wait_notified(double seconds) {
  check_usable();
  std::vector<JobPtr> reported;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for(notified_, lock, seconds, [this] { return !notifications_.empty() || stopping_; });
    reported.assign(notifications_.begin(), notifications_.end());
    notifications_.clear();
  }
  reap();
  return reported;
}

bool Engine::cancel(Job& job) {
  std::vector<JobPtr> ended;
  bool cancelled = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (job.state_ != JobState::Done && job.seq_ >= live_first_) {
      const JobPtr held = live_[job.seq_ - live_first_];
      cancelled = held && cancel_waiting(held, ended);
    }
  }
  announce(ended);
  return cancelled;
}

// Cancelled at once if nothing holds it back; else it ends where it stands in the order.
bool Engine::cancel_waiting(const JobPtr& job, std::vector<JobPtr>& ended) {
  if (job->state_ != JobState::Waiting || job->cancel_) return false;
  job->cancel_ = true;
  job->result_.cancelled = true;
  if (job->queued_) {
    const size_t lane = static_cast<size_t>(job->lane_);
    ready_[job->mover_->waits() ? 1 + lane : 0][lane].erase(job->seq_);
    job->queued_ = false;
    end_jobs(job, ended);
  }
  return true;
}

void Engine::stop_running(const JobPtr& job, std::vector<JobPtr>& ended) {
  if (job->state_ != JobState::Running || !job->queued_) return;  // its last slice is on its way
  const size_t lane = static_cast<size_t>(job->lane_);
  ready_[job->mover_->waits() ? 1 + lane : 0][lane].erase(job->seq_);
  job->queued_ = false;
  job->result_.cancelled = true;
  job->next_unit_ = job->transfer_.num_units;
  if (job->flying_slices_ == 0) end_jobs(job, ended);
}

bool Engine::drain(const Plan& plan, double seconds) {
  check_usable();
  bool drained = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    drained = wait_for(idle_, lock, seconds, [&] {
      return std::none_of(live_.begin(), live_.end(), [&](const JobPtr& job) {
        return job && job->plan_.get() == &plan;
      });
    });
  }
  reap();
  return drained;
}

size_t Engine::cancel_pending() {
  check_usable();
  std::vector<JobPtr> ended;
  size_t cancelled = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::vector<JobPtr> live(live_.begin(), live_.end());
    for (const JobPtr& job : live) {
      if (job) cancelled += cancel_waiting(job, ended);
    }
  }
  announce(ended);
  reap();
  return cancelled;
}

bool Engine::shutdown(bool drain, double seconds) {
  check_usable();
  std::vector<JobPtr> ended;
  bool all_ended = false;
  std::vector<std::thread> threads;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    if (!drain) {
      const std::vector<JobPtr> live(live_.begin(), live_.end());
      for (const JobPtr& job : live) {
        if (!job) continue;
        cancel_waiting(job, ended);
        stop_running(job, ended);
      }
    }
    stalled_lanes_ = 0;
    copy_work_.notify_all();
    for (auto& signal : lane_work_) signal.notify_all();
  }
  announce(ended);  // whoever waits for a cancelled job need not wait for the rest
  {
    std::unique_lock<std::mutex> lock(mutex_);
    all_ended = wait_for(idle_, lock, seconds, [this] { return num_live_ == 0; });
    if (all_ended) {
      stopping_ = true;
      copy_work_.notify_all();
      for (auto& signal : lane_work_) signal.notify_all();
      notified_.notify_all();
      threads.swap(threads_);
    }
  }
  for (std::thread& thread : threads) thread.join();
  reap();
  return all_ended;
}

// Lets go of what finished jobs kept, outside every lock: it may run Python's destructors.
void Engine::reap() {
  std::vector<std::shared_ptr<void>> retired;
  std::lock_guard<std::mutex> lock(mutex_);
  retired.swap(retired_);
}

size_t Engine::in_flight() {
  check_usable();
  reap();
  std::lock_guard<std::mutex> lock(mutex_);
  return num_live_;
}

std::map<std::pair<std::string, std::string>, Counters> Engine::counters() {
  check_usable();
  std::map<std::pair<std::string, std::string>, Counters> by_name;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, counters] : counters_) {
    by_name[{direction_name(key.first), key.second->name()}] = counters;
  }
  return by_name;
}

uint64_t Engine::reports_dropped() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reports_dropped_;
}

// For tests ----------------------------------------------------------------------------------

void Engine::stall(uint32_t lane_mask) {
  check_usable();
  std::lock_guard<std::mutex> lock(mutex_);
  stalled_lanes_ |= lane_mask;
}

void Engine::resume() {
  check_usable();
  std::lock_guard<std::mutex> lock(mutex_);
  stalled_lanes_ = 0;
  copy_work_.notify_all();
  for (auto& signal : lane_work_) signal.notify_all();
}

void Engine::inject_fault(Direction direction, uint32_t layer_id, uint64_t page, std::string why) {
  check_usable();
  std::lock_guard<std::mutex> lock(mutex_);
  faults_.push_back({direction, layer_id, page, std::move(why)});
}

void Engine::clear_faults() {
  check_usable();
  std::lock_guard<std::mutex> lock(mutex_);
  faults_.clear();
}

}  // namespace vkvmap
