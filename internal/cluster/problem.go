package cluster

import "fmt"

// Reasons of problems.
const (
	ReasonAddress     = "InvalidAddress"         // an address or prefix that does not parse
	ReasonFamily      = "WrongFamily"            // an address of another family than announced
	ReasonPort        = "InvalidPort"            // a port number out of range, or missing in a Service
	ReasonPortMissing = "PortNumberMissing"      // an endpoint port without a number
	ReasonProtocol    = "UnknownProtocol"        // neither TCP, UDP nor SCTP
	ReasonDuplicate   = "DuplicatePort"          // two ports of one name and protocol
	ReasonAddressType = "UnsupportedAddressType" // FQDN, or none of the API's
	ReasonNoService   = "NoServiceName"          // a slice that names no Service
	ReasonNoAddress   = "NoAddress"              // an endpoint without addresses
	ReasonValue       = "InvalidValue"           // any other field
	ReasonAnnotation  = "AnnotationTooLong"      // an annotation that is not kept
	ReasonMore        = "MoreProblems"           // further problems were not kept
)

// maxProblems bounds what one broken object can cost in memory and messages.
const maxProblems = 16

// problems collects the problems of one object.
type problems struct {
	list []Problem
	more int
}

func (p *problems) add(reason, format string, args ...any) {
	if len(p.list) == maxProblems {
		p.more++
		return
	}
	p.list = append(p.list, Problem{Reason: reason, Message: fmt.Sprintf(format, args...)})
}

// result returns the problems in exactly the memory they need.
func (p *problems) result() []Problem {
	if p.more > 0 {
		p.list = append(p.list, Problem{ReasonMore, fmt.Sprintf("%d further problems of this object are not listed; mend the listed ones first", p.more)})
	}
	if len(p.list) == 0 {
		return nil
	}
	return append(make([]Problem, 0, len(p.list)), p.list...)
}
