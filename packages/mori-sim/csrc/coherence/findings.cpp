// Reports: each pair of instructions once for a rule, both with pc and source line.
#include <string>

#include "coherence/strict_checker.hpp"
#include "exec/hex.hpp"

namespace mori_sim::strict {

std::string StrictChecker::instruction(const Code* code, uint64_t pc) const {
  if (!code) return "?";
  std::string t = "'" + code->text(pc) + "' at pc " + hex(pc), l = code->line_of(pc);
  return l.empty() ? t : t + " (" + l + ")";
}

void StrictChecker::report(const std::string& rule, Wave& w, uint64_t pc, uint64_t addr, const std::string& text, uint64_t other) {
  if (!once(rule, pc, other) || reports.size() >= ctx_.options->max_reports) return;
  Report r;
  r.rule = rule;
  r.kernel = w.group->kernel->d.name;
  r.device = w.group->kernel->d.device;
  r.pc = pc;
  r.addr = addr;
  r.text = "rule " + rule + ": " + actors_[state(w).actor].name + ": " + instruction(w.code, pc) + " " + text;
  reports.push_back(r);
}

void StrictChecker::finding(const std::string& rule, Wave& w, uint64_t pc, uint64_t addr, const Record& r, const std::string& why) {
  const std::string by = actors_[r.actor].wave ? "stored by " + actors_[r.actor].name + ": " + instruction(r.code, r.pc) : "written by " + actors_[r.actor].name;
  report(rule, w, pc, addr, "at line " + hex(addr) + ", " + by + ". " + why, r.pc);
}

void StrictChecker::report_agent(const std::string& rule, const std::string& name, int device, const std::string& what, uint64_t addr, const Record& r, const std::string& why) {
  if (!once(rule + name, r.pc, 0) || reports.size() >= ctx_.options->max_reports) return;
  Report p;
  p.rule = rule;
  p.device = device;
  p.kernel = actors_[r.actor].name;
  p.pc = r.pc;
  p.addr = addr;
  p.text = "rule " + rule + ": " + name + " (" + what + ") reads memory at " + hex(addr) + " stored by " + actors_[r.actor].name + ": " + instruction(r.code, r.pc) + ". " + why;
  reports.push_back(p);
}

}  // namespace mori_sim::strict
